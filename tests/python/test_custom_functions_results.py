"""What users' functions and libraries' operations return of what they were lent is a copy, which the caller may write to."""

import gc

import pytest
import torch
from helpers import CACHED, COMPUTE, OFFLOAD, assert_same, at, data, same

import torch_offload


def returning(results):
    class Returns(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return results(x, w)

        @staticmethod
        def backward(ctx, *gradients):
            x, w = ctx.saved_tensors
            gradient = sum(gradient for gradient in gradients if gradient is not None)
            return gradient * w, gradient * x

    return Returns


FUNCTIONS = {
    "operand": returning(lambda x, w: w),
    "view": returning(lambda x, w: w.view(2, 4)[:, :]),
    "detached": returning(lambda x, w: w.detach()),
    "tuple": returning(lambda x, w: (x * 2, w)),
    "list": returning(lambda x, w: (x * 2, [w])),  # autograd sees no tensor in it
}


def last(results):
    while isinstance(results, (tuple, list)):
        results = results[-1]
    return results


def check_writes(result, weight):
    """A write to the result is one to nothing else."""
    before, version = at("cpu", 2, 4, seed=1), weight._version
    assert result.device == COMPUTE
    with torch.no_grad():
        result.detach().add_(5)
    assert_same(data(2, 4) * 0 + weight.detach(), before)
    assert_same(weight.detach(), before)
    assert weight._version == version


@pytest.mark.parametrize("grad", ["both", "weight", "input", "none", "no_grad", "inference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_returns_what_it_is_given(name, grad):
    x, weight = data(2, 4), at(OFFLOAD, 2, 4, seed=1)
    x.requires_grad_(grad in ("both", "input"))
    weight.requires_grad_(grad in ("both", "weight", "no_grad"))
    with torch.inference_mode(grad == "inference"), torch.set_grad_enabled(grad != "no_grad"):
        results = FUNCTIONS[name].apply(x, weight)
    value = last(results)
    assert_same(value, at("cpu", 2, 4, seed=1))
    if grad != "inference":
        assert not value._is_view()
    check_writes(value, weight)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_what_is_returned(name):
    def run(device):
        x, weight = data(2, 4).requires_grad_(), at(device, 2, 4, seed=1).requires_grad_()
        results = FUNCTIONS[name].apply(x, weight)
        loss = (last(results) * data(2, 4, seed=3)).sum()
        loss = loss + results[0].square().sum() if isinstance(results, tuple) else loss
        gradients = torch.autograd.grad(loss, [x, weight], create_graph=True)
        second = torch.autograd.grad([gradient.sum() for gradient in gradients], [x, weight], allow_unused=True)
        return results, gradients, second

    same(run)


@pytest.mark.skipif(not CACHED, reason="nothing is pinned")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_returned_holds_no_slot(name):
    gc.collect()  # the frames of errors that other tests have seen
    x, weight = data(2, 4).requires_grad_(), at(OFFLOAD, 2, 4, seed=1).requires_grad_()
    results = FUNCTIONS[name].apply(x, weight)
    assert torch_offload.memory_stats()["device.pinned_slot_bytes.current"] == 0
    del results


class ItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.weight = w
        return (x * w).sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.weight, ctx.weight.t() if ctx.square else None


class Elsewhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, kept):
        ctx.kept = kept[0]
        return (x * w).sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.kept, ctx.kept, None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_weight_that_is_a_gradient(requires_grad):
    """Later gradients are added to the first."""
    x, before = data(4, 4).requires_grad_(), at("cpu", 4, 4, seed=1)
    weight = at(OFFLOAD, 4, 4, seed=1).requires_grad_(requires_grad)
    for k in (1, 2, 3):
        y = ItsGradient.apply(x, weight)
        y.grad_fn.square = requires_grad
        y.backward()
        assert_same(x.grad, before * k)
        if requires_grad:
            assert_same(weight.grad, before.t() * k)
        assert_same(data(4, 4) * 0 + weight.detach(), before)


def test_an_offload_tensor_that_is_a_gradient():
    """Of what the device computes, which has to be fetched for that."""
    x, weight = data(4, 4).requires_grad_(), at(OFFLOAD, 4, 4, seed=1).requires_grad_()
    kept, before = at(OFFLOAD, 4, 4, seed=2), at("cpu", 4, 4, seed=2)
    for k in (1, 2, 3):
        Elsewhere.apply(x, weight, [kept]).backward()
        assert_same((x.grad, weight.grad), (before * k, before * k))
        assert_same(data(4, 4) * 0 + kept, before)


class Vectorised(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return w.view_as(w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, x, w):
        return w.view_as(w)


@pytest.mark.parametrize("transform", ["vjp", "jvp", "vmap"])
def test_transforms_of_what_returns_an_operand(transform):
    x, weight = data(2, 4), at(OFFLOAD, 2, 4, seed=1)
    if transform == "vjp":
        value, pull = torch.func.vjp(lambda w: Vectorised.apply(x, w), weight)
        assert_same(pull(torch.ones_like(value))[0], x)
    elif transform == "jvp":
        value, _ = torch.func.jvp(lambda w: Vectorised.apply(x, w), (weight,), (torch.ones_like(weight),))
    else:
        value = torch.vmap(Vectorised.apply)(x, weight)
    check_writes(value, weight)


@pytest.mark.parametrize("grad", [False, True])
def test_an_operation_that_returns_its_operand(grad):
    x, weight = data(2, 4), at(OFFLOAD, 2, 4, seed=1).requires_grad_(grad)
    value = weight.type_as(x)
    assert value.requires_grad == grad
    if grad:
        (value * x).sum().backward()
        assert_same(weight.grad, x)
    check_writes(value, weight)


def test_a_libraries_operation_that_returns_its_operands():
    library = torch.library.Library("offload_results", "DEF")
    library.define("both(Tensor x, Tensor w, Tensor[] more) -> (Tensor, Tensor[])")
    library.impl("both", lambda x, w, more: (w, [value.t() for value in more]), "CompositeExplicitAutograd")
    x, weight, other = data(2, 4), at(OFFLOAD, 2, 4, seed=1), at(OFFLOAD, 2, 4, seed=1)
    value, (turned,) = torch.ops.offload_results.both(x, weight, [other])
    check_writes(value, weight)
    check_writes(turned, other)
    library._destroy()
