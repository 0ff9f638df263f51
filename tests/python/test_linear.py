"""F.linear with offload weights: forward, both gradients, double backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, FLOATS, OFFLOAD, grads, same
from torch import nn


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (1, 6), (0, 6)], ids=str)
def test_forward_and_backward(shape, bias, dtype):
    def run(device):
        layer = nn.Linear(6, 4, bias=bias).to(dtype).to(device)
        x = torch.randn(shape, dtype=dtype).to(COMPUTE).requires_grad_()
        y = layer(x)
        assert y.device == COMPUTE
        (y * y).sum().backward()
        assert x.grad.device == COMPUTE
        return y, x.grad, grads(layer)

    same(run)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_offload_input(dtype):
    def run(device):
        layer = nn.Linear(6, 4).to(dtype).to(device)
        x = torch.randn(5, 6, dtype=dtype).to(device).requires_grad_()
        y = layer(x)
        assert y.device.type == device.type
        (y * y).sum().backward()
        return y, x.grad, grads(layer)

    same(run)


@pytest.mark.parametrize(
    ("input_needs", "weight_needs", "bias_needs"), list(itertools.product([True, False], repeat=3)), ids=str
)
def test_only_the_gradients_that_are_needed(input_needs, weight_needs, bias_needs):
    def run(device):
        layer = nn.Linear(6, 4).to(device)
        layer.weight.requires_grad_(weight_needs)
        layer.bias.requires_grad_(bias_needs)
        x = torch.randn(5, 6).to(COMPUTE).requires_grad_(input_needs)
        y = layer(x)
        assert y.requires_grad == (input_needs or weight_needs or bias_needs)
        if y.requires_grad:
            y.square().sum().backward()
        assert (layer.weight.grad is None) == (not weight_needs)
        assert (layer.bias.grad is None) == (not bias_needs)
        return y, x.grad, grads(layer)

    same(run)


@pytest.mark.parametrize("of", ["transposed", "sliced", "expanded", "strided"])
def test_weight_is_a_view(of):
    def run(device):
        whole = torch.randn(12, 12).to(device).requires_grad_()
        weight = {
            "transposed": lambda: whole.t(),
            "sliced": lambda: whole[3:7],
            "expanded": lambda: whole[:1].expand(5, 12),
            "strided": lambda: whole[1::3],
        }[of]()
        x = torch.randn(3, 12).to(COMPUTE).requires_grad_()
        y = F.linear(x, weight)
        y.square().sum().backward()
        assert whole.grad.device == whole.device
        return y, x.grad, whole.grad

    same(run)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_weight_of_no_elements(feed):
    def run(device):
        down, up = nn.Linear(6, 0, bias=False).to(device), nn.Linear(0, 3).to(device)
        x = torch.randn(5, 6).to(device if feed == "offload" else COMPUTE).requires_grad_()
        y = up(down(x))
        y.square().sum().backward()
        return y, x.grad, grads(down), grads(up)

    same(run)


def test_input_is_not_contiguous():
    def run(device):
        layer = nn.Linear(6, 4).to(device)
        x = torch.randn(6, 5).to(COMPUTE).requires_grad_()
        y = layer(x.t())
        y.square().sum().backward()
        return y, x.grad, grads(layer)

    same(run)


def test_gradcheck():
    weight = torch.randn(3, 4, dtype=torch.float64).to(OFFLOAD).requires_grad_()
    bias = torch.randn(3, dtype=torch.float64).to(OFFLOAD).requires_grad_()
    x = torch.randn(2, 4, dtype=torch.float64).to(COMPUTE).requires_grad_()

    def run(x, weight, bias):
        return F.linear(x, weight.to(OFFLOAD), bias.to(OFFLOAD))

    # gradcheck perturbs its inputs in place and wants them on one device, so the move is inside.
    plain = [t.detach().to(COMPUTE).requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(run, plain)
    assert torch.autograd.gradgradcheck(run, plain)


def test_double_backward():
    def run(device):
        layer = nn.Linear(6, 4).to(device)
        x = torch.randn(5, 6).to(COMPUTE).requires_grad_()
        y = layer(x).tanh().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        first.square().sum().backward()
        return y, first, x.grad, grads(layer)

    same(run)


def test_bilinear_and_matmul_with_a_parameter():
    def run(device):
        bilinear = nn.Bilinear(3, 4, 2).to(device)
        matrix = nn.Parameter(torch.randn(2, 5).to(device))
        a, b = torch.randn(6, 3).to(COMPUTE), torch.randn(6, 4).to(COMPUTE)
        y = bilinear(a, b) @ matrix
        y.square().sum().backward()
        return y, grads(bilinear), matrix.grad

    same(run)
