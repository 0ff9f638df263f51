"""Processes: exit, fork, spawn, and an interrupted step."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import GPU, SIM, passes, python

EXITS = int(os.environ.get("TORCH_OFFLOAD_TEST_EXITS", "20"))


LAST_STATEMENTS = {
    "backward": """
        import torch, torch_offload
        w = torch.ones(64, 64, device="offload", requires_grad=True)
        (w * w).sum().backward()
    """,
    "backward with hooks": """
        import torch, torch_offload
        net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]).to("offload")
        for p in net.parameters(): p.register_hook(lambda g: g * 2)
        x = torch.ones(4, 8, device="cuda" if torch.cuda.is_available() else "cpu", requires_grad=True)
        net(x).sum().backward()
    """,
    "graph alive": """
        import torch, torch_offload
        net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]).to("offload")
        x = torch.ones(4, 8, device="cuda" if torch.cuda.is_available() else "cpu")
        y = net(x); z = net(x).sum(); z.backward(retain_graph=True)
    """,
    "step": """
        import torch, torch_offload
        net = torch.nn.Linear(8, 8).to("offload")
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    """,
    "exit in a thread": """
        import torch, torch_offload, threading
        w = torch.ones(64, 64, device="offload", requires_grad=True)
        t = threading.Thread(target=lambda: (w * w).sum().backward()); t.start()
    """,
    "sys.exit": """
        import torch, torch_offload, sys
        w = torch.ones(64, 64, device="offload", requires_grad=True)
        (w * torch.ones(64, 64)).sum().backward()
        sys.exit(0)
    """,
    "cycles": """
        import torch, torch_offload
        class Holder: pass
        h = Holder(); h.me = h
        h.w = torch.ones(64, 64, device="offload", requires_grad=True)
        h.y = h.w.to("cuda" if torch.cuda.is_available() else "cpu") * 2
        h.z = h.w @ h.w
    """,
    "atexit of the user's": """
        import atexit, torch, torch_offload
        w = torch.ones(64, 64, device="offload", requires_grad=True)
        atexit.register(lambda: print((w.detach() * 2).sum().item()))
        (w * w).sum().backward()
    """,
    "only imported": "import torch, torch_offload",
    "warm thread pool": """
        import torch, torch_offload
        w = torch.ones(512, 512, device="offload", requires_grad=True)
        ((w @ w) @ torch.ones(512, 512)).sum().backward()
        print(w.grad.sum().item())
    """,
}


@pytest.mark.parametrize("name", LAST_STATEMENTS)
def test_exit(name):
    """A script may end right after its work, every time."""
    repeats = EXITS if name == "backward" else max(1, EXITS // 20)
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(python, [LAST_STATEMENTS[name]] * repeats):
            assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"
            assert done.stderr == ""


def test_a_compiled_function_without_offload_tensors_makes_no_device_used():
    program = """
        import torch, torch_offload
        assert torch.compile(lambda x: x.sin() + 1)(torch.zeros(3)).tolist() == [1, 1, 1]
        print(torch_offload._C.in_use())
    """
    assert passes(program) == "False\n"


def test_spawn(tmp_path):
    """Workers of their own, which are given offload tensors and give some back."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import torch, torch_offload
import multiprocessing

def work(queue, weight):
    weight = weight.to("offload")
    queue.put((weight * 2).sum().item())

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    weight = torch.arange(4.0, device="offload")
    process = context.Process(target=work, args=(queue, weight.cpu()))
    process.start()
    print(queue.get(timeout=100))
    process.join()
    print(process.exitcode)
"""
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.stdout.split() == ["12.0", "0"], done.stderr


def test_data_loader_workers():
    """Workers that return plain tensors, beside a model on offload."""
    passes(
        """
        import torch, torch_offload
        net = torch.nn.Linear(2, 2).to("offload")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        net(torch.ones(1, 2, device=device)).sum().backward()
        data = torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2))
        for method in ("fork", "spawn"):
            loader = torch.utils.data.DataLoader(data, batch_size=3, num_workers=1, multiprocessing_context=method)
            total = sum(net(batch.to(device)).sum() for (batch,) in loader)
            total.backward()
        """
    )


# For a program; what hangs says where.
INTERRUPTED = """
import faulthandler, os, signal, threading, time
faulthandler.dump_traceback_later(200, exit=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background may not have

def interrupted(delay, work, *args):
    seen = threading.Event()
    def interrupt():
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)
        while not seen.wait(10):  # Python loses one that comes in a callback, as of a weak reference
            os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        work(*args)
    except KeyboardInterrupt as error:
        seen.set()
        return error
    finally:
        thread.join()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_keyboard_interrupt_in_mid_step():
    """Then another model in the same process is right."""
    passes(
        INTERRUPTED
        + textwrap.dedent("""
        import torch, torch_offload
        device = "cuda" if torch.cuda.is_available() else "cpu"
        def train(net, x, steps, device):
            optimizer = torch.optim.AdamW(net.parameters())
            for _ in range(steps):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
        def build():
            torch.manual_seed(0)
            return torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)])
        x = torch.ones(4, 32, device=device)
        train(build().to("offload"), x, 2, device)  # what is imported late is imported now
        for delay in (0.02, 0.05, 0.11, 0.17, 0.3):
            interrupted(delay, train, build().to("offload"), x, 10**9, device)
        stats = torch_offload.memory_stats()
        assert stats["device.pinned_slot_bytes.current"] == 0, stats
        net, plain = build().to("offload"), build().to(device)
        a, b = net(x).square().mean(), plain(x).square().mean()
        a.backward(); b.backward()
        assert torch.equal(a, b)
        for p, q in zip(net.parameters(), plain.parameters()):
            assert torch.equal(p.grad.cpu(), q.grad.cpu())
        # The scope of the interrupted step has ended: what is computed is computed on the device again.
        w = torch.ones(8, 8, device="offload")
        before = torch_offload.memory_stats()["link.bytes_to_device"]
        w @ w
        after = torch_offload.memory_stats()["link.bytes_to_device"]
        assert after > before or torch_offload._C.backend() == "host"
        """)
    )


@pytest.mark.parametrize("seed", range(3))
def test_interrupts_at_many_moments(seed):
    """SIGINT in forward, backward, clipping, step, save: no scope, lease or Pin is left, and the same model goes on."""
    passes(
        INTERRUPTED
        + textwrap.dedent(f"""
        import gc, io, random, torch, torch_offload
        torch.set_num_threads(1)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        host = torch_offload._C.backend() == "host"
        moments = random.Random({seed})
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)]).to("offload")
        optimizer = torch.optim.AdamW(net.parameters(), foreach=bool({seed} % 2))
        x = torch.ones(4, 32, device=device)
        def work(steps):
            for _ in range(steps):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                torch.save([p.grad for p in net.parameters()], io.BytesIO())
                net[0].weight @ net[1].weight
        def on_device():
            w = torch.ones(8, 8, device="offload")
            before = torch_offload.memory_stats()["cache.fetches"]
            w @ w
            return host or torch_offload.memory_stats()["cache.fetches"] > before
        work(3)
        kept = []
        for _ in range(25):
            kept.append(interrupted(moments.uniform(0, 0.03), work, 10**9))  # its frames live on, as in a notebook
            assert on_device(), "a scope is left"
        kept.clear()
        gc.collect()
        torch_offload.synchronize()
        stats = torch_offload.memory_stats()
        assert stats["device.pinned_slot_bytes.current"] == 0, stats
        # The same model goes on: forward and backward have the plain model's bits.
        optimizer.zero_grad()
        plain = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)]).to(device)
        plain.load_state_dict(net.state_dict())
        a, b = net(x).square().mean(), plain(x).square().mean()
        a.backward(); b.backward()
        assert torch.equal(a, b)
        for p, q in zip(net.parameters(), plain.parameters()):
            assert torch.equal(p.grad.cpu(), q.grad.cpu())
        with torch.no_grad():
            for p in net.parameters(): p.zero_()  # takes a lease to write
        assert net(x).sum().item() == 0
        """),
        TORCH_OFFLOAD_VALIDATE="1",
    )


def test_out_of_memory_in_mid_fetch():
    """The first memory that is refused raises PyTorch's error; then the same again is right."""
    out = passes(
        """
        import torch, torch_offload
        from torch_offload import _C
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]).to("offload")
        x = torch.ones(4, 32, device=device)
        expected = [net(x).sum().item() for _ in range(2)][0]
        torch_offload.empty_cache()
        refused = 0
        for n in range(1, 60):
            torch_offload.empty_cache()
            _C.fail_call(n)
            try:
                net(x).sum().item()
            except torch.OutOfMemoryError as error:
                refused += 1
                assert len(str(error).splitlines()) == 1, error
            except RuntimeError:
                pass
            _C.fail_call(0)
            assert net(x).sum().item() == expected
        print(refused)
        """,
        TORCH_OFFLOAD_LINK="auto" if GPU else "sim",
        TORCH_OFFLOAD_FAULT="0",
    )
    assert int(out) >= 1  # later ones find something cached to give up


@pytest.mark.parametrize("what", ["forward", "hook", "closure"])
def test_an_exception_in_mid_step_leaves_memory_as_it_was(what):
    passes(
        f"""
        import gc, torch, torch_offload
        device = "cuda" if torch.cuda.is_available() else "cpu"
        def one(fail):
            net = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]).to("offload")
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            if fail and {what!r} == "forward": net[2].register_forward_hook(lambda *a: 1 / 0)
            if fail and {what!r} == "hook": net[1].weight.register_hook(lambda g: 1 / 0)
            def closure():
                net(torch.ones(2, 32, device=device)).sum().backward()
                if fail and {what!r} == "closure": 1 / 0
            try:
                optimizer.step(closure)
            except ZeroDivisionError:
                pass
        one(False); gc.collect()
        before = torch_offload.memory_stats()["host.allocated_bytes.current"]
        for _ in range(10): one(True); gc.collect()
        one(False); gc.collect()
        torch_offload.synchronize()
        after = torch_offload.memory_stats()
        assert after["host.allocated_bytes.current"] == before, (before, after)
        assert after["device.pinned_slot_bytes.current"] == 0
        """
    )


def test_long_training_does_not_grow():
    passes(
        """
        import gc, torch, torch_offload
        device = "cuda" if torch.cuda.is_available() else "cpu"
        net = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]).to("offload")
        optimizer = torch.optim.AdamW(net.parameters())
        def steps(count):
            for k in range(count):
                optimizer.zero_grad()
                net(torch.ones(2 + k % 5, 32, device=device)).square().mean().backward()
                optimizer.step()
            gc.collect()
            torch_offload.synchronize()
            stats = torch_offload.memory_stats()
            names = ("host.allocated_bytes.current", "host.reserved_bytes.current", "host.allocations.current")
            return [stats[name] for name in names]
        first = steps(30)
        assert steps(100) == first, first
        """
    )


@pytest.mark.gpu
@pytest.mark.skipif(not GPU or SIM, reason="needs a CUDA device")
def test_more_than_the_gpu_may_hold_is_refused():
    """Of 256 MiB no copy fits in a ten-thousandth of a GPU, about 14 MB of 139 GiB: neither a fetched one nor one by `to`."""
    out = passes(
        """
        import torch, torch_offload
        w = torch.ones(64 << 20, device="offload")
        one = torch.ones(1, device="cuda")
        torch.cuda.set_per_process_memory_fraction(0.0001)
        for use in (lambda: w * one, lambda: w.to("cuda")):
            try:
                use()
            except torch.OutOfMemoryError:
                print("refused")
        torch.cuda.set_per_process_memory_fraction(1.0)
        print((w * one == 1).all().item(), (w.to("cuda") == 1).all().item())
        """
    )
    assert out.split() == ["refused", "refused", "True", "True"]
