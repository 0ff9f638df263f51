"""Steps of optimizers that return before they are done: whoever wants what they write gets it as it will be."""

import copy
import gc
import io
import os
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import CACHED, COMPUTE, LATE, OFFLOAD, assert_same, data, deterministic, layers, passes, pending_jobs
from torch import nn

import torch_offload

SIZE = 1 << 14
pytestmark = [
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.skipif(not CACHED, reason="there is no device to give work meanwhile"),
    pytest.mark.skipif(os.environ.get("TORCH_OFFLOAD_HOST_JOBS") == "now", reason="nothing is done later"),
]


def stepped(count=1):
    """Parameters that were 1 and, once the step is done, are 0.5."""
    leaves = [nn.Parameter(torch.ones(SIZE).to(OFFLOAD)) for _ in range(count)]
    for leaf in leaves:
        leaf.grad = torch.ones(SIZE).to(OFFLOAD)
    torch_offload.synchronize()
    optimizer = torch.optim.SGD(leaves, lr=0.5)
    optimizer.step()
    return leaves, optimizer


def saved(leaf):
    file = io.BytesIO()
    torch.save(leaf, file)
    file.seek(0)
    return torch.load(file)


def changed(leaf, write):
    write(leaf.detach())
    return leaf


def resized(leaf):
    tensor = leaf.detach().clone(memory_format=torch.preserve_format)
    return tensor.resize_(2 * SIZE)[:SIZE]


READS = {
    "to the CPU": lambda p: p.cpu(),
    "to the device": lambda p: p.to(COMPUTE),
    "an item": lambda p: p[7].item() * torch.ones(SIZE),
    "a product": lambda p: p * torch.ones(SIZE, device=COMPUTE),
    "alone": lambda p: p * 1,
    "linear": lambda p: F.linear(torch.eye(128, device=COMPUTE), p.view(128, -1).t()).t().reshape(-1),
    "a view": lambda p: p.detach().view(2, -1)[1].repeat(2),
    "in place": lambda p: changed(p, lambda t: t.add_(0)),
    "a list": lambda p: changed(p, lambda t: torch._foreach_add_([t], 0)),
    "copied to": lambda p: torch.zeros(SIZE).copy_(p.detach()),
    "copied from": lambda p: changed(p, lambda t: t[:4].copy_(torch.full((4,), 0.5))),
    "a clone": lambda p: p.detach().clone(),
    "a deep copy": copy.deepcopy,
    "a pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "a file": saved,
    "a storage": lambda p: torch.empty(0).set_(p.detach().untyped_storage().cpu().cpu(), 0, (SIZE,)),
    "a shared storage": lambda p: changed(p, lambda t: t.share_memory_()),
    "resized": resized,
    "another thing's gradient": lambda p: (
        torch.autograd.grad((p * data(SIZE).requires_grad_()).sum(), [p], retain_graph=True)[0].mul(0).to(COMPUTE)
        + p.to(COMPUTE)
    ),
    "after all": lambda p: torch_offload.synchronize() or p.cpu(),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_after_a_step(read):
    (leaf,), _ = stepped()
    if LATE:
        assert pending_jobs() == 1
    value = READS[read](leaf)
    assert pending_jobs() == 0 or not LATE
    assert_same(value.detach().cpu(), torch.full((SIZE,), 0.5))
    assert_same(leaf.detach().cpu(), torch.full((SIZE,), 0.5))


@pytest.mark.skipif(not LATE, reason="a thread does them")
def test_a_fetch_waits_for_its_own_update():
    leaves, _ = stepped(4)
    assert pending_jobs() == 4
    assert (leaves[2].to(COMPUTE) == 0.5).all()
    assert pending_jobs() == 3
    torch_offload.synchronize()
    assert pending_jobs() == 0


@pytest.fixture
def gate():
    """Until it is set, no update by ``addcmul_`` ends, whichever thread does it."""
    gate = threading.Event()

    def held(a, b, c, *, value=1):
        assert gate.wait(120)
        return a.add_(b * c, alpha=value)

    library = torch.library.Library("aten", "IMPL")
    library.impl("addcmul_", held, "CPU")
    yield gate
    gate.set()
    torch_offload.synchronize()
    library._destroy()


READS_OF_ITS_OWN = {
    "a fetch": lambda p: p.to(COMPUTE),
    "a product": lambda p: p * torch.ones(SIZE, device=COMPUTE),
    "a read": lambda p: p.detach().cpu(),
    "a write": lambda p: p.detach().add_(0),
}


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("read", READS_OF_ITS_OWN)
def test_a_read_waits_for_no_update_of_others(read, gate):
    """Those can't be done before the gate is open: whoever waited for one would find none left."""
    others = [torch.ones(1 << 18).to(OFFLOAD) for _ in range(3)]
    torch_offload.synchronize()
    (leaf,), _ = stepped()
    for other in others:
        other.addcmul_(other.detach().clone(), other.detach().clone(), value=0.5)
    assert 3 <= pending_jobs() <= 4
    late = threading.Timer(60, gate.set)  # a mistake is an error then, and no test that never ends
    late.start()
    value = READS_OF_ITS_OWN[read](leaf)
    assert pending_jobs() == 3
    assert not gate.is_set()
    late.cancel()
    assert_same(value.detach().cpu(), torch.full((SIZE,), 0.5))
    assert pending_jobs() == 3
    gate.set()
    for other in others:
        assert_same(other.to(COMPUTE).cpu(), torch.full((1 << 18,), 1.5))
    torch_offload.synchronize()  # the bytes are there before their job is over
    assert pending_jobs() == 0


def test_what_other_processes_see_is_done_at_once():
    leaves = [nn.Parameter(torch.ones(SIZE).to(OFFLOAD)) for _ in range(2)]
    leaves[0].share_memory_()
    for leaf in leaves:
        leaf.grad = torch.ones(SIZE).to(OFFLOAD)
    optimizer = torch.optim.SGD(leaves, lr=0.5)
    optimizer.step()
    optimizer.step()
    assert pending_jobs() <= 2, "those of the parameter that nobody shares"
    leaves[1].detach().cpu()
    assert pending_jobs() == 0
    for leaf in leaves:
        assert_same(leaf.detach().cpu(), torch.zeros(SIZE))


def test_the_gradient_is_the_one_that_there_was():
    """What changes or frees it after the step is no concern of the step's."""
    for change in (
        lambda p, o: o.zero_grad(set_to_none=True),
        lambda p, o: o.zero_grad(set_to_none=False),
        lambda p, o: p.grad.fill_(7),
        lambda p, o: setattr(p, "grad", torch.full((SIZE,), 9.0).to(OFFLOAD)),
        lambda p, o: (p * torch.ones(SIZE, device=COMPUTE)).sum().backward(),
    ):
        (leaf,), optimizer = stepped()
        change(leaf, optimizer)
        assert_same(leaf.detach().cpu(), torch.full((SIZE,), 0.5))


def test_steps_on_end():
    (leaf,), optimizer = stepped()
    for _ in range(3):
        optimizer.step()
    assert_same(leaf.detach().cpu(), torch.full((SIZE,), -1.0))


def test_what_is_freed_lives_until_the_step_is_done():
    gc.collect()
    torch_offload.synchronize()
    before = torch_offload.memory_stats()["host.allocated_bytes.current"]
    leaves, optimizer = stepped(3)
    del leaves, optimizer
    gc.collect()
    torch_offload.synchronize()
    gc.collect()
    assert torch_offload.memory_stats()["host.allocated_bytes.current"] == before


def test_versions_count_at_once():
    (leaf,), optimizer = stepped()
    before = leaf._version
    optimizer.step()
    assert leaf._version > before
    y = (leaf * data(SIZE).requires_grad_()).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training(micro_batches):
    torch.manual_seed(0)
    plain = layers(4, 128).to(COMPUTE)
    host = copy.deepcopy(plain).cpu()
    net = copy.deepcopy(plain).to(OFFLOAD)

    def train(net, step_by=None):
        """Gradients are the device's; the step is the CPU's."""
        optimizer = torch.optim.AdamW((step_by or net).parameters(), lr=0.01, foreach=False)
        losses = []
        for k in range(5):
            for j in range(micro_batches):
                loss = net(data(8, 128, seed=10 * k + j)).square().mean()
                loss.backward()
                losses.append(loss.detach())
            if step_by is not None:
                for theirs, ours in zip(step_by.parameters(), net.parameters(), strict=True):
                    theirs.grad, ours.grad = ours.grad.cpu(), None
            optimizer.step()
            optimizer.zero_grad()
            if step_by is not None:
                for theirs, ours in zip(step_by.parameters(), net.parameters(), strict=True):
                    ours.data.copy_(theirs.data)
        return losses

    with deterministic():
        expected = train(plain, host)
        assert_same(torch.stack(train(net)), torch.stack(expected))
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert_same(ours.detach().cpu(), theirs.detach().cpu())


@pytest.mark.parametrize("jobs", ["soon", "wanted"])
def test_a_program_ends_with_steps_to_do(jobs):
    program = f"""
        import torch, torch_offload
        p = torch.nn.Parameter(torch.ones({SIZE}).to("offload"))
        p.grad = torch.ones({SIZE}).to("offload")
        optimizer = torch.optim.AdamW([p])
        for _ in range(20):
            optimizer.step()
        print("all")
    """
    assert passes(program, TORCH_OFFLOAD_HOST_JOBS=jobs).split() == ["all"]


@pytest.mark.parametrize("jobs", ["soon", "wanted"])
def test_a_forked_child_waits_for_no_job_of_its_parent(jobs):
    program = f"""
        import os, sys, torch, torch_offload
        leaves = [torch.nn.Parameter(torch.ones({SIZE}).to("offload")) for _ in range(50)]
        for leaf in leaves:
            leaf.grad = torch.ones({SIZE}).to("offload")
        torch.optim.AdamW(leaves).step()
        child = os.fork()
        if child == 0:
            try:
                torch_offload.synchronize()
            except RuntimeError as error:
                assert "was forked from one" in str(error)
                sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert passes(program, TORCH_OFFLOAD_HOST_JOBS=jobs).split() == ["7"]


@pytest.mark.parametrize("jobs", ["soon", "wanted"])
def test_threads_that_wait_for_jobs_let_each_other_go_on(jobs):
    program = """
        import sys, threading, torch, torch_offload
        sys.setswitchinterval(1e-5)
        ends = []
        def run(a, wait):
            for _ in range(100):
                a.add_(a * 2)
                wait()
                a.mul_(0.25)
            return a
        def work():
            ends.append(run(torch.ones(1 << 18).to("offload"), torch_offload.synchronize).cpu())
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = run(torch.ones(1 << 18), lambda: None)
        print(all(end.equal(expected) for end in ends) and len(ends))
    """
    assert passes(program, 120, TORCH_OFFLOAD_HOST_JOBS=jobs).split() == ["3"]
