"""Backward through a graph that a backward has recorded, in the orders in which programs do it: each graph may run again."""

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, Scaled, at, data, grads, same
from torch import nn
from torch.autograd import grad


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        return Scaled.apply(x, self.weight)


def net(first, *shape):
    torch.manual_seed(0)
    model = nn.Sequential(first(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(1))
    model(torch.zeros(shape))  # makes the lazy layer
    return model


NETS = {
    "linear": (lambda: nn.Linear(6, 8), (5, 6)),
    "conv": (lambda: nn.Conv1d(2, 3, 3), (5, 2, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (5, 6)),
    "a user's function": (Scale, (5, 6)),
}


def loss_then_penalty(loss, penalty, first):
    loss.backward(retain_graph=True)
    penalty.backward()


def penalty_then_loss(loss, penalty, first):
    penalty.backward(retain_graph=True)
    loss.backward()


def penalty_twice(loss, penalty, first):
    penalty.backward(retain_graph=True)
    penalty.backward()


def each_row_alone(loss, penalty, first):
    for row in first:
        row.sum().backward(retain_graph=True)
    penalty.backward()


def both_at_once(loss, penalty, first):
    (loss + penalty).backward()


@pytest.mark.parametrize("order", [loss_then_penalty, penalty_then_loss, penalty_twice, each_row_alone, both_at_once])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("fed_from", ["the compute device", "offload"])
def test_gradient_penalty(order, name, fed_from):
    first, shape = NETS[name]

    def run(device):
        model, x = net(first, *shape).to(device), data(*shape, device=COMPUTE).requires_grad_()
        if fed_from == "offload":
            x = x.detach().to(device).requires_grad_()
        y = model(x)
        (by_x,) = grad(y.sum(), x, create_graph=True)
        order(y.square().mean(), (by_x.flatten(1).norm(dim=1) - 1).square().mean(), by_x)
        return grads(model), x.grad

    same(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_penalty_under_autocast(dtype):
    def run(device):
        model, x = net(lambda: nn.Linear(6, 8), 5, 6).to(device), data(5, 6).requires_grad_()
        with torch.autocast(COMPUTE.type, dtype):
            y = model(x)
        (by_x,) = grad(y.float().sum(), x, create_graph=True)
        penalty_twice(None, by_x.square().sum(), None)
        return grads(model)

    same(run)


def test_hessian():
    def run(device):
        model, x = net(lambda: nn.Linear(6, 8), 5, 6).to(device), data(5, 6)
        return torch.autograd.functional.hessian(lambda x: model(x).tanh().sum(), x)

    same(run)


def test_first_order_meta_learning_beside_second_order():
    def run(device):
        weight = at(device, 4, 6).requires_grad_()
        x, y = data(5, 6), data(5, 4, seed=8)

        def loss(w):
            return (torch.nn.functional.linear(x, w).tanh() - y).square().mean()

        fast = weight
        for step in range(4):
            (by_weight,) = grad(loss(fast), fast, create_graph=step % 2 == 0)
            fast = fast - 0.1 * by_weight
        loss(fast).backward()
        return weight.grad, fast

    same(run)


def test_gradgradcheck_of_a_frozen_weight():
    weight = at(OFFLOAD, 4, 6, dtype=torch.float64)
    x = data(3, 6).double().requires_grad_()

    def f(x):
        return torch.nn.functional.linear(x, weight).tanh()

    assert torch.autograd.gradcheck(f, (x,))
    assert torch.autograd.gradgradcheck(f, (x,))
