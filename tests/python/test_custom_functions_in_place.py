"""Users' ``torch.autograd.Function``s that write to what they are given."""

import weakref

import pytest
import torch
from helpers import CACHED, COMPUTE, OFFLOAD, data, same

import torch_offload


class ScalesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.mark_dirty(x)
        x.mul_(factor)
        ctx.save_for_backward(factor)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


class ExponentInPlace(torch.autograd.Function):
    """Saves what it has written, which is its result."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.mark_dirty(x)
        x.exp_().mul_(factor)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.parametrize("function", [ScalesInPlace, ExponentInPlace])
def test_an_operand_that_is_changed_in_place(function):
    def run(device):
        x, factor = data(3, 4, device=device).requires_grad_(), torch.tensor([2.0, 3.0, 0.5, 1.0], device=COMPUTE)
        y = x * 1
        before = y._version
        z = function.apply(y, factor)
        assert z is y
        assert z.device == x.device
        (z * y).sum().backward()
        return x.grad, y, y._version - before

    same(run)


@pytest.mark.parametrize("backward", [False, True])
def test_an_operand_that_is_changed_in_place_goes_when_nobody_has_it(backward):
    x, factor = data(3, 4, device=OFFLOAD).requires_grad_(), torch.full((4,), 2.0, device=COMPUTE)
    y = x * 1
    z = ScalesInPlace.apply(y, factor)
    if backward:
        z.sum().backward()
    gone = weakref.ref(y)
    del y, z
    assert gone() is None


def test_a_state_that_takes_over_the_result_goes_when_nobody_has_it():
    state, x = data(3, 4, device=OFFLOAD), data(3, 4).requires_grad_()
    state.copy_(KeepsBoth.apply(x, state))
    gone = weakref.ref(state)
    del state
    assert gone() is None


class KeepsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.save_for_backward(x, state)
        return x * state

    @staticmethod
    def backward(ctx, gradient):
        x, state = ctx.saved_tensors
        return gradient * state, gradient * x


class ScalesTangentsInPlace(ScalesInPlace):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return ScalesInPlace.forward(ctx, x, factor)

    @staticmethod
    def jvp(ctx, tangent, of_factor):
        return tangent.mul_(ctx.factor)


def test_the_tangent_of_what_is_changed_in_place():
    def run(device):
        factor = torch.full((4,), 2.0, device=COMPUTE)
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(data(3, 4, device=device), data(3, 4, device=device, seed=3))
            ScalesTangentsInPlace.apply(x, factor)
            return tuple(torch.autograd.forward_ad.unpack_dual(x))

    same(run)


def test_an_operand_that_is_changed_in_place_without_gradients():
    def run(device):
        x, factor = data(3, 4, device=device), torch.full((4,), 2.0, device=COMPUTE)
        with torch.no_grad():
            result = ScalesInPlace.apply(x, factor)
        assert result is x
        result.add_(10)
        return x

    same(run)


def test_a_leaf_that_is_changed_in_place_is_refused():
    x = torch.ones(2, device=OFFLOAD, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        ScalesInPlace.apply(x, torch.ones(2, device=COMPUTE))


class Appends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cache):
        cache[0] = x
        return x + cache.sum(0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_in_inference_mode_come_home(mode):
    def run(device):
        with mode():
            caches = [torch.zeros(3, 4, device=device), data(3, 4, device=device) * 2]
            results = [Appends.apply(data(4), cache) for cache in caches]
            return [cache + 0 for cache in caches], [cache.cpu() for cache in caches], results

    same(run)


@pytest.mark.skipif(not CACHED, reason="nothing is copied where there is no cache")
def test_reads_in_inference_mode_copy_nothing_home():
    with torch.inference_mode():
        weight = data(4, 8).to(OFFLOAD)
        torch_offload.synchronize()
        before = torch_offload.memory_stats()["link.copies_to_host"]
        for _ in range(3):
            KeepsBoth.apply(data(4, 8), weight)
        torch_offload.synchronize()
        assert torch_offload.memory_stats()["link.copies_to_host"] == before


class WritesInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        count.add_(1)
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.count, None


@pytest.mark.skipif(not CACHED, reason="nothing is copied where there is no cache")
def test_a_write_in_forward_comes_home_once():
    count, x = torch.zeros(3).to(OFFLOAD), data(3).requires_grad_()

    def copies(run):
        torch_offload.synchronize()
        before = torch_offload.memory_stats()["link.copies_to_host"]
        value = run()
        torch_offload.synchronize()
        return value, torch_offload.memory_stats()["link.copies_to_host"] - before

    y, written = copies(lambda: WritesInForward.apply(x, count).sum())
    assert written == 1
    assert copies(y.backward)[1] == 0
    torch.testing.assert_close(x.grad.cpu(), torch.ones(3))


def test_a_view_that_is_changed_in_place():
    def run(device):
        x, factor = data(3, 4, device=device).requires_grad_(), torch.full((4,), 2.0, device=COMPUTE)
        y = x * 1
        z = ScalesInPlace.apply(y[1:], factor)
        (y.sum() + z.sum()).backward()
        return x.grad, y

    same(run)
