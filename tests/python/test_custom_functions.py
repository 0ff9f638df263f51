"""Users' ``torch.autograd.Function``s over offload weights, kept on ``ctx`` or saved."""

import pytest
import torch
from helpers import COMPUTE, data, same


class KeepsTheWeight(torch.autograd.Function):
    """What many quantised layers do: the weight is kept on ``ctx`` and not saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class SavesTheWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@pytest.mark.parametrize("function", [KeepsTheWeight, SavesTheWeight])
def test_custom_function_is_given_a_fetched_weight(function):
    def run(device):
        weights = [data(8, 8, device=device, seed=k).requires_grad_() for k in range(4)]
        x = data(3, 8).requires_grad_()
        h = x
        for weight in weights:
            h = function.apply(h, weight.to(COMPUTE)).tanh()
        h.square().sum().backward()
        assert all(w.grad.device == w.device for w in weights)
        return h, x.grad, [w.grad for w in weights]

    same(run)


@pytest.mark.parametrize("function", [KeepsTheWeight, SavesTheWeight])
def test_custom_function_mixes_an_offload_weight_with_plain_activations(function):
    def run(device):
        weights = [data(8, 8, device=device, seed=k).requires_grad_() for k in range(4)]
        x = data(3, 8).requires_grad_()
        h = x
        for weight in weights:
            h = function.apply(h, weight).tanh()
        h.square().sum().backward()
        assert all(w.grad.device == w.device for w in weights)
        return h, x.grad, [w.grad for w in weights]

    same(run)
