"""Forward, backward and fetches from several threads, and on several CUDA streams."""

import threading

import pytest
import torch
from helpers import OFFLOAD, SIM, data, grads, layers, same


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


@pytest.mark.gpu
def test_fetched_on_one_stream_and_used_on_another():
    weight = data(512, 512, device=OFFLOAD)
    expected = weight.cpu()
    side = torch.cuda.Stream()
    for _ in range(20):
        fetched = weight.to("cuda", non_blocking=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = fetched * 1
            fetched.record_stream(side)
        del fetched
        for k in range(4):
            data(512, 512, device=OFFLOAD, seed=k).to("cuda")
        side.synchronize()
        assert torch.equal(copy.cpu(), expected)
