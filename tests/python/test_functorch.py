"""torch.func over offload tensors: either PyTorch's result or a sentence that says no."""

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, OFFLOAD, SIM, assert_same, at, same
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_grad(feed):
    def run(device):
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(device)
        x = torch.randn(3, 4).to(device if feed == "offload" else COMPUTE)
        parameters = dict(net.named_parameters())

        def loss(parameters, x):
            return functional_call(net, parameters, (x,)).square().mean()

        gradients, value = grad_and_value(loss)(parameters, x)
        for name, gradient in gradients.items():
            assert gradient.device == parameters[name].device
        return gradients, value, grad(loss, argnums=1)(parameters, x)

    same(run)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_vmap(feed):
    def run(device):
        weight, bias = torch.randn(5, 4).to(device), torch.randn(5).to(device)
        x = torch.randn(3, 4).to(device if feed == "offload" else COMPUTE)
        return vmap(lambda x: F.linear(x, weight, bias).tanh())(x), vmap(lambda w: (x * w).sum(0))(weight)

    same(run)


@pytest.mark.parametrize("batch", [0, 1, -1])
@pytest.mark.parametrize("name", ["fetch", "stash"])
@pytest.mark.filterwarnings("error:There is a performance drop")
def test_batches_move_as_a_whole(name, batch):
    target = torch.device("cpu:0") if SIM else COMPUTE
    start, to = {"fetch": (OFFLOAD, target), "stash": (COMPUTE, OFFLOAD)}[name]
    move = getattr(torch.ops.offload, name)
    value, numbers = at(start, 3, 4, 5), at(to, 2, seed=1)
    moved = vmap(lambda x: move(x, to), in_dims=batch, out_dims=batch)(value)
    assert moved.device.type == to.type
    assert_same(moved, value)
    assert_same(vmap(vmap(lambda x: move(x, to)))(value), value)
    expected = at(to, 3, 4, 5)[:, None] * numbers[None, :, None, None]
    assert_same(vmap(lambda x: vmap(lambda n: move(x, to) * n)(numbers))(value), expected)
    assert_same(vmap(lambda n: vmap(lambda x: move(x, to) * n)(value), out_dims=1)(numbers), expected)


def test_per_sample_gradients():
    def run(device):
        net = nn.Linear(4, 2).to(device)
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        x, t = torch.randn(3, 4).to(COMPUTE), torch.randn(3, 2).to(COMPUTE)

        def loss(parameters, x, t):
            return F.mse_loss(functional_call(net, parameters, (x,)), t)

        return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, t)

    same(run)


def test_ensemble():
    def run(device):
        nets = [nn.Linear(4, 2) for _ in range(3)]
        for net in nets:
            net.to(device)
        parameters, buffers = stack_module_state(nets)
        base = nn.Linear(4, 2).to("meta")
        x = torch.randn(5, 4).to(COMPUTE)
        return vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)

    same(run)


def test_vjp_and_jacobians():
    def run(device):
        weight = torch.randn(3, 4).to(device)
        x = torch.randn(4).to(COMPUTE)
        value, pull = vjp(lambda x, w: (w @ x).tanh(), x, weight)
        to_x, to_weight = pull(torch.ones(3).to(COMPUTE))
        return value, to_x, to_weight, jacrev(lambda x: (weight @ x).tanh())(x)

    same(run)


def test_forward_mode():
    def run(device):
        weight = torch.randn(3, 4).to(device)
        x, dx = torch.randn(4).to(COMPUTE), torch.randn(4).to(COMPUTE)
        return jvp(lambda x: (weight @ x).tanh(), (x,), (dx,)), jacfwd(lambda x: (weight @ x).tanh())(x)

    same(run)


def test_hessian():
    def run(device):
        weight = torch.randn(3, 4).to(device)
        x = torch.randn(4).to(COMPUTE)
        return hessian(lambda x: (weight @ x).tanh().sum())(x)

    same(run)


def test_autograd_functional():
    def run(device):
        weight = torch.randn(3, 4).to(device)
        x = torch.randn(4).to(COMPUTE)
        return torch.autograd.functional.jacobian(lambda x: (weight @ x).tanh(), x)

    same(run)


OF_WEIGHTS = {
    "sum": lambda w, x: (w * x).tanh().sum(0),
    "mean": lambda w, x: (w @ x).square().mean(1),
    "expanded": lambda w, x: (w.expand(2, 3, 3) * x).cumsum(0),
    "stacked": lambda w, x: torch.column_stack([w, w.sum(1)]) * x.sum(),
}


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("function", OF_WEIGHTS)
def test_gradients_in_batches(function, feed):
    """Of an offload weight, with many values for the result's gradient at once, some of which are expanded."""

    def run(device):
        weight, x = at(device, 3, 3), at(device if feed == "offload" else COMPUTE, 3, 3, seed=1)

        def of(w):
            return OF_WEIGHTS[function](w, x)

        leaf = weight.clone().requires_grad_()
        y = of(leaf)
        gradients = torch.eye(y.numel(), device=y.device).view(-1, *y.shape)
        (batch,) = torch.autograd.grad(y, leaf, gradients, is_grads_batched=True)
        assert batch.device == leaf.device
        functional = torch.autograd.functional
        squared = functional.hessian(lambda w: of(w).square().sum(), weight, vectorize=True)
        return batch, functional.jacobian(of, weight, vectorize=True), squared

    same(run)


def test_the_process_stays_usable():
    """Whatever functorch refused above, the next ordinary step is right."""
    with pytest.raises(RuntimeError):
        vmap(lambda x: x.nonzero())(torch.ones(3, 2, device=OFFLOAD))
    layer = nn.Linear(4, 2).to(OFFLOAD)
    plain = nn.Linear(4, 2)
    plain.load_state_dict(layer.state_dict())
    plain.to(COMPUTE)
    x = torch.randn(3, 4).to(COMPUTE)
    assert_same(layer(x), plain(x))
