"""Tensor subclasses on the device that computes, beside offload weights, and names of dimensions."""

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, assert_same, at, same
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

SEEN = set()  # devices of all that subclasses were called with


class Logged(torch.Tensor):
    """As somebody writes it who looks at what is called."""

    @staticmethod
    def __new__(cls, value):
        value = value.detach()
        made = torch.Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), dtype=value.dtype, device=value.device
        )
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(value):
            return value.value if isinstance(value, Logged) else value

        args, kwargs = pytree.tree_map(inner, (args, kwargs or {}))
        if func.namespace == "aten" and torch._C._current_graph_task_id() == -1:
            SEEN.update(value.device for value in pytree.tree_leaves(args) if isinstance(value, torch.Tensor))
        return pytree.tree_map_only(torch.Tensor, Logged, func(*args, **kwargs))


def plain(value):
    return value.value if isinstance(value, Logged) else value


MODULES = {
    "linear": lambda: nn.Linear(4, 4),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "norms": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.BatchNorm1d(4), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("way", ["plain", "autocast", "checkpoint"])
@pytest.mark.parametrize("name", MODULES)
def test_activations_of_a_subclass(name, way):
    """They compute where they are, and gradients go where the weights are."""
    SEEN.clear()

    def run(device):
        module = MODULES[name]().to(device)
        x = Logged(at("cpu", 3, 4).to(COMPUTE)).requires_grad_()
        for _ in range(2):
            with torch.autocast(COMPUTE.type, torch.bfloat16, enabled=way == "autocast"):
                y = checkpoint(module, x, use_reentrant=False) if way == "checkpoint" else module(x)
            y.float().square().sum().backward()
        gradients = [plain(p.grad) for p in module.parameters() if p.requires_grad]
        assert all(gradient.device.type == device.type for gradient in gradients)
        return plain(y), plain(x.grad), gradients, list(module.buffers())

    same(run)
    assert set(SEEN) == {COMPUTE}


def test_second_gradients_of_a_subclass():
    def run(device):
        weight, x = at(device, 4, seed=1).requires_grad_(), Logged(at("cpu", 3, 4).to(COMPUTE)).requires_grad_()
        (gradient,) = torch.autograd.grad((x * weight).tanh().sum(), weight, create_graph=True)
        gradient.square().sum().backward()
        return plain(weight.grad), plain(x.grad)

    same(run)


def test_a_write_to_a_subclass():
    x, weight = Logged(at("cpu", 3, 4).to(COMPUTE)), at(OFFLOAD, 4, seed=1)
    x.mul_(weight)
    assert_same(x.value, at("cpu", 3, 4) * at("cpu", 4, seed=1))


def named(test):
    test = pytest.mark.filterwarnings("ignore:Named tensors")(test)
    return pytest.mark.skipif(not hasattr(torch.Tensor, "names"), reason="this PyTorch has no named tensors")(test)


NAMED = {
    "alone": lambda x, w: (
        x + 1,
        x.sum("C"),
        x.t(),
        x.align_to("C", "N"),
        x.flatten(["N", "C"], "F"),
        x[0],
        x.clone(),
        x * x,
    ),
    "beside": lambda x, w: (w.refine_names(..., "C") * x, x * w.refine_names("C"), x + w),
    "product": lambda x, w: (x @ torch.ones(4, 2, device=COMPUTE, names=("C", "D")),),
    "moved": lambda x, w: (x.cpu(), x.double(), x.to(COMPUTE), torch.ones_like(x)),
    "written": lambda x, w: (x.clone().add_(1).mul_(w), torch.cat([x, x], "N")),
}


@named
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_names_of_dimensions(name, grad):
    def run(device):
        x, w = at(device, 3, 4).requires_grad_(grad), at("cpu", 4, seed=1).to(COMPUTE)
        results = NAMED[name](x.refine_names("N", "C"), w)
        said = [result.names for result in results]
        results = [result.rename(None) for result in results]
        if grad:
            sum(result.to(COMPUTE).float().square().sum() for result in results if result.requires_grad).backward()
        return said, results, x.grad

    same(run)


@named
def test_names_that_do_not_match():
    for device in (COMPUTE, OFFLOAD):
        with pytest.raises(RuntimeError, match="same position from the right but do not match"):
            at(device, 3, 4).refine_names("N", "C") + at("cpu", 3, 4).to(COMPUTE).refine_names("C", "N")
