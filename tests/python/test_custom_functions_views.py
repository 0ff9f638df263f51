"""Users' functions that are given views of one offload storage: inside, a write to one is a write to the others."""

import pytest
import torch
from helpers import CACHED, OFFLOAD, at, data, same, says

import torch_offload


class WritesToViews(torch.autograd.Function):
    """Two operands of one storage, each of which it changes where it is told to."""

    @staticmethod
    def forward(ctx, x, one, other, writes):
        ctx.one, ctx.other, ctx.writes = one, other, writes
        if "one" in writes:
            one.add_(1000)
        if "other" in writes:
            other.mul_(2)
        return x * one.sum() + other.sum()

    @staticmethod
    def backward(ctx, gradient):
        with torch.no_grad():
            if "one later" in ctx.writes:
                ctx.one.add_(500)
            if "other later" in ctx.writes:
                ctx.other.mul_(3)
        return gradient * ctx.one.sum() + ctx.other.sum(), None, None, None


VIEWS = {
    "halves": lambda w: (w[:512], w[512:]),
    "small": lambda w: (w[3:5], w[5:9]),  # within one aligned piece
    "far apart": lambda w: (w[900:], w[:7]),
    "one within the other": lambda w: (w, w[512:]),
    "the same": lambda w: (w, w),
    "of another dtype": lambda w: (w[:512], w.view(torch.float64)[300:]),
    "expanded": lambda w: (w[:512], w[600].expand(5).narrow(0, 0, 1)),
}


@pytest.mark.parametrize(
    "writes", [(), ("one",), ("other",), ("one", "other"), ("other later",), ("one", "one later", "other later")]
)
@pytest.mark.parametrize("views", VIEWS)
def test_views_of_one_storage_are_views_of_one_memory(views, writes):
    def run(device):
        w, x = at("cpu", 1024).to(device), data(3).requires_grad_()
        y = WritesToViews.apply(x, *VIEWS[views](w), writes)
        seen = w.cpu().clone()
        torch_offload.empty_cache()
        y.sum().backward()
        after = w.cpu().clone()
        torch_offload.empty_cache()
        return y, seen, after, w.cpu(), x.grad

    same(run)


def test_gradients_of_views_of_one_storage():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, one, other):
            ctx.save_for_backward(x, one, other)
            return x * one * other

        @staticmethod
        def backward(ctx, gradient):
            x, one, other = ctx.saved_tensors
            return gradient * one * other, gradient * x * other, gradient * x * one

    def run(device):
        w, x = data(10, device=device).requires_grad_(), data(4).requires_grad_()
        y = Product.apply(x, w[1:5], w[4:8])
        torch_offload.empty_cache()
        y.sum().backward()
        return y, x.grad, w.grad

    same(run)


@pytest.mark.skipif(not CACHED, reason="what is lent is the host's memory")
def test_a_storage_that_shrinks_before_backward():
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, one, other):
            ctx.save_for_backward(x, one, other)
            return x * one.sum() + other.sum()

        @staticmethod
        def backward(ctx, gradient):
            _, one, _ = ctx.saved_tensors
            return gradient * one.sum(), None, None

    w, x = at(OFFLOAD, 100), data(3).requires_grad_()
    y = Sum.apply(x, w[:10], w[20:30])
    w.untyped_storage().resize_(60)
    sentence = "offload: a tensor of shape [10] needs 120 bytes of its storage, which has 60; the storage was resized or freed."
    says(RuntimeError, sentence, lambda: y.sum().backward())
