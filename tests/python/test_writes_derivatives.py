"""Writes in place and what goes with them beside bytes: tangents, functorch's levels, and the count that autograd compares."""

import pytest
import torch
import torch.autograd.forward_ad as fa
from helpers import COMPUTE, OFFLOAD, at, data, same
from torch import nn
from torch.func import functional_call, grad, jvp

WRITES = {
    "mul_": lambda q, x: q.mul_(x),
    "multiply_": lambda q, x: q.multiply_(x),
    "true_divide_": lambda q, x: q.true_divide_(x),
    "lerp_": lambda q, x: q.lerp_(x, 0.25),
    "clamp_": lambda q, x: q.clamp_(max=x),
    "index_add_": lambda q, x: q.index_add_(0, torch.tensor([0, 2, 3], device=x.device), x[:3]),
    "zero_": lambda q, x: q.zero_(),
    "copy_": lambda q, x: q.copy_(x),
    "_foreach_add_": lambda q, x: torch._foreach_add_([q], [x]),
    "a view": lambda q, x: q.view(2, 2).mul_(x.view(2, 2)),
    "a part": lambda q, x: q[1:].mul_(x[1:]),
}
PLACES = {"plain": COMPUTE, "offload": OFFLOAD}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dual", ["target", "operand", "both"])
@pytest.mark.parametrize("name", WRITES)
def test_the_tangent_of_what_is_written_to(name, dual, place):
    def run(device):
        beside = COMPUTE if device == COMPUTE else PLACES[place]
        with fa.dual_level():
            q, x = at(device, 4, seed=1), at(beside, 4, seed=2)
            if dual != "operand":
                q = fa.make_dual(q, at(device, 4, seed=3))
            if dual != "target":
                x = fa.make_dual(x, at(beside, 4, seed=4))
            q = q * 1
            WRITES[name](q, x)
            return list(fa.unpack_dual(q))

    same(run)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [name for name in WRITES if name != "_foreach_add_"])
def test_writes_within_functorchs_transforms(name, place):
    def run(device):
        beside = COMPUTE if device == COMPUTE else PLACES[place]

        def constant(w):
            q = w.detach() * 1
            WRITES[name](q, at(beside, 4, seed=2))
            return (w * q).sum()

        def differentiated(w):
            q = w * 1
            WRITES[name](q, at(beside, 4, seed=2))
            return q.square()

        w, tangent = at(device, 4, seed=1), at(device, 4, seed=3)
        return grad(constant)(w), grad(lambda w: differentiated(w).sum())(w), jvp(differentiated, (w,), (tangent,))

    same(run)


@pytest.mark.parametrize("place", PLACES)
def test_buffers_that_a_transformed_function_is_given(place):
    def run(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        x = data(4, 3, device=COMPUTE if device == COMPUTE else PLACES[place])

        def loss(parameters, buffers, x):
            return functional_call(net, (parameters, buffers), (x,)).pow(2).sum()

        return [*grad(loss)(parameters, buffers, x).values(), *buffers.values()]

    same(run)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("born", PLACES)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_in_inference_mode_is_counted(name, born, place):
    def run(device):
        a = at(device, 4, seed=1)
        if born == "plain":
            a = a * 1  # where operations compute
        w = at(device, 4, seed=2).requires_grad_()
        y = (a * w).sum()
        with torch.inference_mode():
            WRITES[name](a, at(COMPUTE if device == COMPUTE else PLACES[place], 4, seed=3))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        return a

    same(run)
