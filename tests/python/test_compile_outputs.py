"""What compiled graphs return is the caller's to write to, and never memory that was fetched."""

import pytest
import torch
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, OFFLOAD, SIM, assert_same, at, data


def fetched(w):
    return torch.ops.offload.fetch(w, torch.device("cpu:0") if SIM else COMPUTE)


class Copying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * 2, w.clone()

    @staticmethod
    def backward(ctx, x, w):
        return x * 2, w


def two_copies(x, w):
    value = fetched(w)
    return value.clone(), value.clone(), value.clone().t()


def two_views(x, w):
    copy = fetched(w).clone()
    return copy.t(), copy[0]


COPIES = {
    "clone": lambda x, w: (fetched(w).clone(),),
    "cat": lambda x, w: (torch.cat([w, x[:0]]),),
    "slice": lambda x, w: (torch.slice_scatter(x, fetched(w)),),
    "pad": lambda x, w: (torch.constant_pad_nd(fetched(w), (0, 0)),),
    "repeat": lambda x, w: (fetched(w).repeat(1, 1),),
    "function": lambda x, w: (Copying.apply(x, w)[1],),
    "two copies": two_copies,
    "two views": two_views,
    "gaps": lambda x, w: (fetched(w)[:, ::2],),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_weight_is_a_copy(name, grad):
    x, weight, before = data(3, 8), at(OFFLOAD, 3, 8, seed=1).requires_grad_(grad), at("cpu", 3, 8, seed=1)
    step = compiled(COPIES[name], "inductor")
    for _ in range(2):
        results, expected = step(x, weight), COPIES[name](x, weight)
        for result, value in zip(results, expected, strict=True):
            assert_same(result.detach(), value.detach())
            assert result.stride() == value.stride() or name == "gaps"  # copies are dense
        results[0].detach().add_(5)
        assert_same(weight.detach(), before)
        assert_same(fetched(weight).detach(), before)
        if name == "two copies":
            assert_same(results[1].detach(), before)


class ItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return (x * w).sum()

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return w, None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_that_is_a_gradient(backend):
    """Later gradients are added to the first."""
    x, weight, before = data(3, 8).requires_grad_(), at(OFFLOAD, 3, 8, seed=1).requires_grad_(), at("cpu", 3, 8, seed=1)
    step = compiled(ItsGradient.apply, backend)
    for k in (1, 2, 3):
        step(x, weight).backward()
        torch.testing.assert_close(x.grad.cpu(), before * k)
        assert_same(fetched(weight).detach(), before)
