"""Forward, backward and fetches from several threads, and on several CUDA streams."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, SIM, data, grads, layers, same

import torch_offload


def test_threads_on_one_model():
    def run(device):
        net = layers(4).to(device)
        results: dict[int, object] = {}

        def work(k):
            x = data(3, 8, seed=k).requires_grad_()
            found = torch.autograd.grad(net(x).square().mean(), [x, *net.parameters()])
            results[k] = found

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[k] for k in range(4)]

    if SIM:
        pytest.skip("the simulated link is one thread's by design")
    same(run)


def test_threads_that_load_a_model():
    """As transformers does: each tensor is moved and cast by one of four threads, and nothing is read meanwhile."""
    sources = [data(size, device="cpu", seed=size) for size in (64, 4096, 5000, 20_000, 300_000)]
    expected = [value.to(torch.bfloat16) for value in sources]

    def move(k):
        return sources[k % len(sources)].to(device="offload", dtype=torch.bfloat16)

    for _ in range(30):
        with ThreadPoolExecutor(4) as pool:
            moved = list(pool.map(move, range(200)))
        assert all(torch.equal(value.cpu(), expected[k % len(sources)]) for k, value in enumerate(moved))


def test_backward_in_another_thread():
    def run(device):
        net = layers(4).to(device)
        loss = net(data(3, 8)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return grads(net)

    same(run)


@pytest.mark.gpu
def test_side_streams_and_another_thread():
    """Forward on stream A, backward from another thread, the caller on stream B."""
    net = layers(6, 64).to(OFFLOAD)
    plain = layers(6, 64)
    plain.load_state_dict(net.state_dict())
    plain.cuda()
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    for k in range(10):
        x = data(32, 64, seed=k)
        a.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(a):
            loss = net(x).square().mean()
        b.wait_stream(a)
        with torch.cuda.stream(b):
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            found = [p.grad.to("cuda") for p in net.parameters()]
        torch.cuda.current_stream().wait_stream(b)
        plain(x).square().mean().backward()
        for gradient, q in zip(found, plain.parameters(), strict=True):
            assert torch.equal(gradient, q.grad)
        net.zero_grad()
        plain.zero_grad()


@pytest.fixture
def small_ring():
    """Memory that is given up is used again at once."""
    before = torch_offload.get_ring_bytes()
    torch_offload.set_ring_bytes(1 << 20)
    torch_offload.set_budget(0)
    yield
    torch_offload.set_ring_bytes(before)
    torch_offload.set_budget("auto")


@pytest.mark.gpu
def test_record_stream_keeps_what_was_fetched(small_ring):
    """Fetched on one stream and used late on another, when others want the memory."""
    weight = data(512, 512).to(OFFLOAD)
    expected = weight.cpu()
    others = [data(512, 512, seed=100 + k).to(OFFLOAD) for k in range(8)]
    side = torch.cuda.Stream()
    for _ in range(5):
        fetched = torch.ops.offload.fetch(weight, COMPUTE)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            copy = fetched * 1
        fetched.record_stream(side)
        del fetched
        for other in others:
            torch.ops.offload.fetch(other, COMPUTE)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(copy.cpu(), expected)


@pytest.mark.gpu
def test_record_stream_on_plain_tensors_is_pytorchs():
    side = torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    address = x.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # half a second, as other processes may have the cores
        y = x * 2
    x.record_stream(side)
    del x
    assert torch.zeros(1 << 20, device="cuda").data_ptr() != address
    torch.cuda.current_stream().wait_stream(side)
    assert y.sum().item() == 2 << 20
