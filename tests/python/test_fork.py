"""Forked children: what goes on, what is refused, and that none waits for a lock that nobody gives back."""

import textwrap

import pytest
from helpers import COMPUTE, HOST, passes


def status_of_fork(parent: str, child: str) -> int:
    """The exit status of a child that a process forks after having used a layer ``net`` on an input ``x``."""
    program = f"""
import os, torch, torch_offload, warnings
warnings.simplefilter("ignore")
net = torch.nn.Linear(8, 8).to("offload")
x = torch.ones(4, 8)
{parent}
pid = os.fork()
if pid == 0:
{textwrap.indent(textwrap.dedent(child), "    ")}
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    return int(passes(program))


@pytest.mark.skipif(not HOST, reason="there is a device that does not survive a fork")
def test_fork_after_use_on_the_host():
    child = """
        assert torch.equal(net(x), y)
        os._exit(5 if torch.equal((net.weight * 2).cpu(), net.weight.cpu() * 2) else 1)
    """
    assert status_of_fork("y = net(x).detach()", child) == 5


def children_that_hang(program: str, work: str, make: str, child: str, forks: int) -> int:
    """How many children do not end that are forked while two threads do ``work``.

    Each is forked behind ``make``, and does ``child``; at the first that does not end there is an end.
    """
    loop = f"""
import os, threading, time, torch, torch_offload
torch.set_num_threads(1)
{textwrap.dedent(program)}
def work():
{textwrap.indent(textwrap.dedent(work), "    ")}
ends = threading.Event()
def forever():
    while not ends.is_set(): work()
threads = [threading.Thread(target=forever) for _ in range(2)]
for thread in threads: thread.start()
hanging = 0
for _ in range({forks}):
{textwrap.indent(textwrap.dedent(make), "    ")}
    child = os.fork()
    if child == 0:
{textwrap.indent(textwrap.dedent(child), "        ")}
        os._exit(0)
    until = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            hanging += 1
            os.kill(child, 9)
            os.waitpid(child, 0)
            break
        time.sleep(0.001)
    if hanging: break
ends.set()
for thread in threads: thread.join()
print(hanging)
"""
    return int(passes(loop))


@pytest.mark.skipif(not HOST, reason="there is a device that does not survive a fork")
def test_fork_while_other_threads_make_tensors():
    """As data loaders do beside a thread that prepares the next batch: a child finds no lock that nobody gives back."""
    program = """
        weight = torch.ones(8, 8, device="offload")
    """
    work = """
        for n in (10, 300, 9000):
            torch.empty(n, device="offload").fill_(2)
        weight @ torch.ones(8, 8)
    """
    assert children_that_hang(program, work, "", "work()", 100) == 0


@pytest.mark.skipif(HOST, reason="plain host memory survives a fork")
@pytest.mark.parametrize("held", ["a fetched tensor", "a graph"])
def test_a_child_lets_go_of_what_it_has_not_made(held):
    """As a worker does that was forked in the middle of a step; the locks of the cache may be nobody's there.

    Of PyTorch's own tensors of the device none is let go: its allocator takes a lock that may be nobody's, too.
    """
    program = f"""
        device = torch.device("{COMPUTE.type}:0")
        weights = [torch.ones(8, device="offload", requires_grad=True) for _ in range(300)]
        x = torch.ones(8, device=device)
    """
    work = """
        with torch_offload.saved_tensors(min_bytes=0):
            torch.cat([*weights, x]).square().sum()
    """
    make = {
        "a fetched tensor": "held = torch.ops.offload.fetch(weights[0].detach(), device)",
        "a graph": """
            with torch_offload.saved_tensors(min_bytes=0):
                loss = sum((weight * x).exp().sum() for weight in weights[:50])
            held = loss.grad_fn
            del loss
        """,
    }[held]
    assert children_that_hang(program, work, make, "del held", 200) == 0


@pytest.mark.skipif(not HOST, reason="there is a device that does not survive a fork")
def test_backward_fork_backward():
    """Plain CPU PyTorch does this; a device thread of the autograd engine would forbid it."""
    child = """
        net.zero_grad()
        net(x).sum().backward()
        os._exit(5 if net.weight.grad.sum().item() == 256 else 1)
    """
    assert status_of_fork("net(x).sum().backward()", child) == 5


@pytest.mark.skipif(HOST, reason="plain host memory survives a fork")
def test_fork_after_use_beside_a_device_is_refused_in_one_sentence():
    out = passes(
        """
        import os, torch, torch_offload
        w = torch.ones(3, device="offload")
        w.sum().item()
        pid = os.fork()
        if pid == 0:
            try:
                (w + 1).sum().item()
            except RuntimeError as error:
                print(str(error).splitlines()[0], flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print((w + 1).sum().item())
        """
    )
    assert "spawn" in out
    assert out.splitlines()[-1] == "6.0"


@pytest.mark.skipif(HOST, reason="plain host memory survives a fork")
def test_a_child_that_has_no_offload_tensors_may_go_on():
    """As a worker does that loads data."""
    program = """
        import os, torch, torch_offload
        w = torch.ones(3, device="offload")
        w.sum().item()
        pid = os.fork()
        if pid == 0:
            assert not torch_offload._C.in_use()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
            torch.set_num_threads(1)
            x = torch.ones(3, requires_grad=True)
            with torch.autograd.set_multithreading_enabled(False):
                (x * x).sum().backward()
            torch.optim.SGD([x], lr=0.5).step()
            os._exit(5 if x.tolist() == [0, 0, 0] else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert passes(program) == "5\n"


def test_fork_before_use():
    assert passes(
        """
            import os, torch, torch_offload
            pid = os.fork()
            w = torch.arange(3.0).to("offload") if not (torch.cuda.is_available() and pid == 0) else torch.arange(3.0)
            value = (w * 2).sum().item()
            if pid == 0: os._exit(int(value))
            print(value, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            """
    ).split() == ["6.0", "6"]
