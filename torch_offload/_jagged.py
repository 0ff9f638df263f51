"""Jagged tensors on the device that computes: what is beside them on offload is fetched in front of them.

Autograd has kernels of its own for them, which come before those of every device: they take an offload operand as it is, and
want its gradient on offload. A graph that is compiled calls operations on the jagged tensor's parts, beside the operand.
"""

import functools
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils import _pytree as pytree

from torch_offload import _C
from torch_offload._functions import call_fetched
from torch_offload._wrappers import is_offload, target_of

# What asks for the tensors themselves that it is given; and what makes a jagged tensor of one, beside one that is empty.
_LEFT = {
    *[torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad],
    torch._nested_view_from_jagged,
}


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call writes to no operand but a jagged one, and computes with what the others hold."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # a property, of which each call asks many
        return False
    writes = "out" in kwargs or (name.endswith("_") and args and not isinstance(args[0], NestedTensor))
    return not writes and func not in _LEFT


def _target(values: list[Any]) -> torch.device | None:
    """Where offload tensors are fetched that a jagged one elsewhere is called with."""
    with torch._C.DisableTorchFunctionSubclass():
        found = [value for value in values if is_offload(value)]
        plain = found and not any(isinstance(value, NestedTensor) for value in found)
        return target_of(values) if plain else None


def _fetching(original: classmethod) -> classmethod:
    def method(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = functools.partial(original.__get__(None, cls), func, types)
        if (torch.compiler.is_dynamo_compiling() or _C.in_use()) and _reads(func, args, kwargs):
            flat, spec = pytree.tree_flatten((args, kwargs))
            target = _target(flat)
            if target is not None:
                return call_fetched(lambda *values: call(*pytree.tree_unflatten(values, spec)), flat, target)
        return call(args, kwargs)

    return classmethod(method)


def register() -> None:
    NestedTensor.__torch_function__ = _fetching(NestedTensor.__dict__["__torch_function__"])
