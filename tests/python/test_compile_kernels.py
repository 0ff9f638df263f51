"""Inductor makes as many kernels of an offload model's graph as of the plain model's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compiling import compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, OFFLOAD, assert_same, data, grads
from torch import nn
from torch._inductor import metrics


class Block(nn.Module):
    """Of a transformer, with one norm and one output at both places: their gradients are added up."""

    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.mixed(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))
        y = self.norm(x)
        return x + self.out(F.silu(self.gate(y)) * self.up(y))


def outcome(model, x, trains):
    """What one step gives, and how many kernels were generated for it."""
    torch.compiler.reset()
    metrics.reset()
    step = compiled(model, "inductor")
    with torch.set_grad_enabled(trains):
        y = step(x)
    if trains:
        y.square().sum().backward()
    gradients = {name: gradient.cpu() for name, gradient in grads(model).items() if gradient is not None}
    return metrics.generated_kernel_count, y.detach(), gradients


@pytest.mark.parametrize("trains", [False, True], ids=["forward", "training"])
def test_as_many_kernels(trains):
    torch.manual_seed(0)
    model, x = Block().to(COMPUTE), data(2, 4, 16)
    expected = outcome(copy.deepcopy(model), x, trains)
    assert expected[0] > 0
    assert_same(outcome(model.to(OFFLOAD), x, trains), expected)
