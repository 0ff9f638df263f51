"""Gradients of models on offload, whichever way they are asked for: the plain device's bits, where their tensors are."""

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, OFFLOAD, data, grads, layers, same
from torch import nn


@pytest.mark.memcheck
def test_many_layers():
    def run(device):
        net = layers(8).to(device)
        x = data(3, 8).requires_grad_()
        y = net(x)
        y.square().mean().backward()
        return y, x.grad, grads(net)

    same(run)


def test_weight_used_twice():
    def run(device):
        layer = nn.Linear(8, 8).to(device)
        x = data(3, 8).requires_grad_()
        y = layer(layer(x).tanh())
        y.square().sum().backward()
        return y, x.grad, grads(layer)

    same(run)


def test_weight_used_twice_in_one_operation():
    def run(device):
        weight = data(8, 8, device=device).requires_grad_()
        x = data(3, 8)
        y = x @ torch.cat([weight, weight, weight.t()], dim=1)
        y.square().sum().backward()
        z = torch.addmm(weight, weight, x.new_ones(8, 8))
        z.square().sum().backward()
        return y, z, weight.grad

    same(run)


@pytest.mark.parametrize("times", [2, 4])
def test_gradient_accumulation(times):
    def run(device):
        net = layers().to(device)
        for k in range(times):
            net(data(3, 8, seed=k)).square().mean().backward()
        return grads(net)

    same(run)


def test_gradients_are_read_at_once():
    def run(device):
        net = layers().to(device)
        net(data(3, 8)).square().mean().backward()
        items = [p.grad.sum().item() for p in net.parameters()]
        arrays = [torch.from_numpy(p.grad.cpu().numpy()) for p in net.parameters()]
        return items, arrays

    same(run)


def test_retain_graph():
    def run(device):
        net = layers().to(device)
        x = data(3, 8).requires_grad_()
        loss = net(x).square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return x.grad, grads(net)

    same(run)


def test_two_losses_of_one_forward():
    def run(device):
        net = layers().to(device)
        h = net(data(3, 8))
        h.mean().backward(retain_graph=True)
        h.square().sum().backward()
        return grads(net)

    same(run)


@pytest.mark.parametrize("order", [2, 3])
def test_create_graph(order):
    def run(device):
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(device)
        x = data(3, 4).requires_grad_()
        y = net(x).sum()
        for _ in range(order - 1):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
            y = y.square().sum()
        y.backward()
        return y, x.grad, grads(net)

    same(run)


def test_gradient_penalty_in_parameters():
    """Gradients of parameters' gradients: these are computed from offload tensors."""

    def run(device):
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(device)
        x = data(3, 4)
        first = torch.autograd.grad(net(x).sum(), list(net.parameters()), create_graph=True)
        for gradient, parameter in zip(first, net.parameters(), strict=True):
            assert gradient.device == parameter.device
        sum(g.square().sum() for g in first).backward()
        return first, grads(net)

    same(run)


def test_autograd_grad():
    def run(device):
        net = layers().to(device)
        x = data(3, 8).requires_grad_()
        found = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
        assert found[0].device == COMPUTE
        assert all(p.grad is None for p in net.parameters())
        return found

    same(run)


def test_autograd_grad_of_some():
    def run(device):
        net = layers().to(device)
        unused = data(3, device=device).requires_grad_()
        return torch.autograd.grad(
            net(data(3, 8)).sum(), [net[0].weight, unused], allow_unused=True, materialize_grads=True
        )

    same(run)


def test_frozen_weights_get_no_gradient():
    def run(device):
        net = layers().to(device)
        for parameter in net[2].parameters():
            parameter.requires_grad_(False)
        x = data(3, 8).requires_grad_()
        net(x).square().mean().backward()
        assert net[2].weight.grad is None
        return x.grad, grads(net)

    same(run)


def test_nothing_is_recorded_for_an_all_frozen_model():
    net = layers().to(OFFLOAD).requires_grad_(False)
    y = net(data(3, 8))
    assert not y.requires_grad
    assert y.grad_fn is None


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_residual_connection(feed):
    """A gradient that flows on along two ways, and that a hook keeps, is not what the sum of both is written into."""

    def run(device):
        place = device if feed == "offload" else COMPUTE
        x = data(3, 8, device=place).requires_grad_()
        kept = []
        h = x * 2
        layer = nn.Linear(8, 8).to(device)
        for _ in range(3):
            h = h + layer(h).tanh()
            h.register_hook(kept.append)
            h = h.tanh() + h
            h.register_hook(kept.append)
            h.retain_grad()
            kept.append(h)
        start = data(3, 8, device=place, seed=3)
        h.backward(start)
        return x.grad, start, [t if t.grad_fn is None else t.grad for t in kept], grads(layer)

    same(run)


def test_gradient_of_a_non_leaf():
    def run(device):
        weight = data(8, 8, device=device).requires_grad_()
        scaled = weight * 0.5
        assert scaled.device.type == device.type
        scaled.retain_grad()
        y = F.linear(data(3, 8), scaled)
        y.square().sum().backward()
        assert scaled.grad.device == scaled.device
        return scaled.grad, weight.grad

    same(run)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_gradient_set_and_changed_by_hand(feed):
    def run(device):
        layer = nn.Linear(8, 8).to(device)
        place = device if feed == "offload" else COMPUTE
        layer.weight.grad = torch.ones(8, 8, device=device)
        for k in range(3):
            layer(data(3, 8, device=place, seed=k)).square().sum().backward()
            layer.weight.grad *= 0.5
            layer.weight.grad[0] = 0
            layer.bias.grad = layer.bias.grad.clone() + 1
        return grads(layer)

    same(run)


def test_set_detach_under_the_same_name():
    def run(device):
        w = data(8, 8, device=device).requires_grad_()
        state = torch.zeros(3, 8).to(COMPUTE)
        losses = []
        for k in range(3):  # truncated backpropagation through time
            state = (state.detach() + data(3, 8, seed=k) @ w).tanh()
            loss = state.square().mean()
            loss.backward()
            losses.append(loss)
        return losses, w.grad

    same(run)


def test_inputs_argument_of_backward():
    def run(device):
        net = layers(3).to(device)
        x = data(3, 8).requires_grad_()
        net(x).square().mean().backward(inputs=[net[2].weight])
        assert x.grad is None
        assert net[0].weight.grad is None
        return net[2].weight.grad

    same(run)


def test_two_models_interleaved():
    def run(device):
        one, two = layers(4).to(device), layers(4).to(device)
        x = data(3, 8)
        a = one(x).square().mean()
        b = two(x).square().mean()
        c = one(two(x)).square().mean()
        b.backward()
        c.backward()
        a.backward()
        return grads(one), grads(two)

    same(run)


def test_detach_and_requires_grad():
    weight = data(4, 4, device=OFFLOAD).requires_grad_()
    shared = weight.detach()
    assert not shared.requires_grad
    assert shared.data_ptr() == weight.data_ptr()
    assert weight.is_leaf
    assert weight.grad_fn is None
    assert not weight.data.requires_grad


def test_gradient_takes_the_layout_of_its_parameter():
    def run(device):
        weight = data(4, 6, device=device).t().requires_grad_()
        assert weight.is_leaf
        F.linear(data(3, 4), weight).square().sum().backward()
        return weight.grad, weight.grad.stride()

    same(run)


def test_anomaly_mode():
    def run(device):
        net = layers(2).to(device)
        with torch.autograd.detect_anomaly(check_nan=True):
            net(data(3, 8)).square().mean().backward()
        return grads(net)

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        same(run)


def test_forward_mode():
    def run(device):
        layer = nn.Linear(8, 8).to(device)
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(data(3, 8), data(3, 8, seed=1))
            primal, tangent = torch.autograd.forward_ad.unpack_dual(layer(x))
        return primal, tangent

    same(run)


DUAL = {
    "multiply": (lambda x, w: w * 2, (8,)),
    "sine": (lambda x, w: w.sin(), (8,)),
    "sum": (lambda x, w: w + w, (8,)),
    "in place": (lambda x, w: w.clone().mul_(w), (8,)),
    "beside activations": (lambda x, w: x * w, (8,)),
    "linear": (lambda x, w: F.linear(x, w), (5, 8)),
    "conv": (lambda x, w: F.conv1d(x[None], w), (2, 3, 2)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (8,), w), (8,)),
    "clone": (lambda x, w: w.clone(), (8,)),
    "view": (lambda x, w: w.view(-1).sum(), (5, 8)),
    "embedding": (lambda x, w: F.embedding(torch.tensor([1, 2], device=x.device), w), (5, 8)),
    "there and back": (lambda x, w: (w * 2).to(w.device) * 3, (8,)),
}


@pytest.mark.parametrize("name", DUAL)
@pytest.mark.parametrize("transform", [False, True], ids=["dual level", "torch.func"])
def test_forward_mode_by_weights(name, transform):
    """Tangents of tensors on offload."""
    function, shape = DUAL[name]

    def run(device):
        x = data(3, 8)
        w, tangent = data(*shape, seed=1).to(device), data(*shape, seed=2).to(device)
        if transform:
            return torch.func.jvp(lambda w: function(x, w), (w,), (tangent,))
        with torch.autograd.forward_ad.dual_level():
            result = torch.autograd.forward_ad.unpack_dual(function(x, torch.autograd.forward_ad.make_dual(w, tangent)))
        assert result.tangent.device == result.primal.device
        return tuple(result)

    same(run)


def test_hessian_by_weights():
    def run(device):
        w = data(4, seed=1).to(device)
        return torch.func.hessian(lambda w: (w.sin() * w).sum())(w)

    same(run)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_vectorized_forward_mode(feed):
    def run(device):
        w = torch.randn(2, 3).to(device)
        x = torch.randn(3).to(device if feed == "offload" else COMPUTE)
        return torch.autograd.functional.jacobian(
            lambda x: (w * x).exp().sum(0), x, vectorize=True, strategy="forward-mode"
        )

    same(run)
