"""Two GPUs: compute follows the activations, whichever device is current and whichever offload device the weights are on."""

import threading

import pytest
import torch
from helpers import assert_same, data, layers

import torch_offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_operations():
    with torch.offload.device(1):
        assert torch.ones(1, device="offload").device.index == 1
    a, b = torch.ones(2, 2, device="offload:1"), torch.ones(2, 2, device="cuda:1")
    assert (a @ b).device == torch.device("cuda:1")
    assert (a @ torch.ones(2, 2, device="cuda:0")).device == torch.device("cuda:0")
    assert (a @ a).device == torch.device("offload:1")
    assert a.to("offload:0").device == torch.device("offload:0")


def step(net, x, current):
    with torch.cuda.device(current):
        loss = net(x).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        torch.optim.SGD(net.parameters(), lr=0.25).step()
        gradients = [p.grad for p in net.parameters()]
        net.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("home", [0, 1])
def test_training(home, target, current):
    """The device that is current is not asked."""
    net = layers(6, 64).to(f"offload:{home}")
    plain = layers(6, 64)
    plain.load_state_dict(net.state_dict())
    plain.to(f"cuda:{target}")
    for k in range(10):
        x = data(32, 64, seed=k).to(f"cuda:{target}")
        assert_same(step(net, x, current), step(plain, x, target))
    assert all(p.device == torch.device("offload", home) for p in net.parameters())
    assert_same(list(net.parameters()), list(plain.parameters()))


def test_a_model_across_both():
    """Activations move from one GPU to the other between layers whose weights are on one offload device."""
    first, second = layers(2, 64).to("offload:0"), layers(2, 64).to("offload:0")
    plain_first, plain_second = layers(2, 64), layers(2, 64)
    plain_first.load_state_dict(first.state_dict())
    plain_second.load_state_dict(second.state_dict())
    plain_first.to("cuda:0")
    plain_second.to("cuda:1")
    for k in range(5):
        x = data(32, 64, seed=k).to("cuda:0")
        results = []
        for a, b in ((first, second), (plain_first, plain_second)):
            loss = b(a(x).to("cuda:1")).square().mean()
            loss.backward()
            results.append([loss.detach(), *[p.grad.cpu() for p in (*a.parameters(), *b.parameters())]])
            a.zero_grad()
            b.zero_grad()
        assert_same(results[0], results[1])


def test_one_weight_on_both():
    """Cached on both devices, changed on the host: both see the change."""
    weight = data(64, 64).to("offload:0")
    for k in range(20):
        results = [data(8, 64).to(f"cuda:{i}") @ weight for i in (0, 1)]
        assert_same(results[0], results[1])
        assert_same(results[0], data(8, 64).to("cuda:0") @ weight.to("cuda:0"))
        with torch_offload.on_host():
            weight += k
