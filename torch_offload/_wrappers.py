"""Tensor subclasses that wrap others (torchao's quantised weights): beside activations their parts are fetched as they are.

Such a class computes in Python, part by part. With its parts on offload it would see offload tensors alone where it unpacks
them, and make what is unpacked an offload tensor. Fetched as a whole it is what its author assumed: a tensor beside the
others, whose packed bytes have travelled and nothing else.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_offload import _C

_NAMES = [
    *["linear", "bilinear", "embedding", "embedding_bag", "scaled_mm", "grouped_mm", "scaled_grouped_mm"],
    *["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"],
    *["matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "inner", "einsum", "tensordot"],
    *["addmm", "addmv", "addbmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"],
]
_SPACES = (torch, torch.Tensor, torch.nn.functional)
# What `__torch_function__` is called with and only reads. Everything else says in its schema, further down, what it writes.
_PRODUCTS = {getattr(space, name) for name in _NAMES for space in _SPACES if hasattr(space, name)}


def paired_device(index: int | None) -> torch.device:
    """Where results of `offload:i` alone are computed."""
    return _C.paired_device(index or 0)  # a wrapper may tell none


# As torch.compiler.assume_constant_result() does, which imports the compiler: graphs may hold the device.
paired_device._dynamo_marked_constant = True


def target_of(values: Sequence[Any]) -> torch.device | None:
    """Where the placement rule computes; None if there is nothing to fetch, or offload tensors alone."""
    devices: dict[str, torch.device] = {}
    offload = cuda_scalar = None
    dims = False
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type == "offload":
            offload = value if offload is None else offload
            dims = dims or value.dim() > 0
        elif value.dim() == 0:
            cuda_scalar = value.device if value.is_cuda else cuda_scalar
        else:
            devices.setdefault(value.device.type, value.device)
    if offload is None:
        return None
    if "cpu" in devices and "cuda" not in devices:
        paired = paired_device(offload.device.index)
        return paired if paired.type == "cpu" else devices["cpu"]
    return devices.get("cuda", None if dims else cuda_scalar)


def is_offload(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "offload"


def device_for(values: Sequence[Any]) -> torch.device:
    """Where a kernel runs that is given these, of which one is on offload."""
    offload = next(value for value in values if is_offload(value))
    return target_of(values) or paired_device(offload.device.index)


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "offload" and is_traceable_wrapper_subclass(value)


def _is_trained_wrapper(value: Any) -> bool:
    return _is_wrapper(value) and value.requires_grad and torch.is_grad_enabled()


def _moved(context: Any, target: torch.device) -> Any:
    """What a wrapper is rebuilt with beside its parts, where this tells of its device."""
    if isinstance(context, torch.device):
        return target if context.type == "offload" else context
    if isinstance(context, dict):
        return {key: _moved(value, target) for key, value in context.items()}
    if isinstance(context, (tuple, list)) and type(context) in (tuple, list):
        return type(context)(_moved(value, target) for value in context)
    if dataclasses.is_dataclass(context) and isinstance(getattr(context, "device", None), torch.device):
        return dataclasses.replace(context, device=_moved(context.device, target))
    return context


def _over(wrapper: Any, fetch: Callable[[Any], Any]) -> Any:
    """Another wrapper, over what `fetch` gives for each of its parts."""
    names, context = wrapper.__tensor_flatten__()
    parts = {name: fetch(getattr(wrapper, name)) for name in names}
    context = _moved(context, next(iter(parts.values())).device)
    return type(wrapper).__tensor_unflatten__(parts, context, wrapper.size(), wrapper.stride())


def fetched(value: Any, target: torch.device) -> Any:
    """An offload tensor's value on another device; of a wrapper another one over its parts there, unless it is trained."""
    if not is_offload(value) or _is_trained_wrapper(value):
        return value
    return fetched_below(value, target)


def fetched_below(value: Any, target: torch.device) -> Any:
    """The same of any wrapper, where autograd's kernels have run already and record nothing."""
    if not is_offload(value):
        return value
    if not is_traceable_wrapper_subclass(value):
        return torch.ops.offload.fetch(value, target)
    return _over(value, lambda part: fetched_below(part, target))


def _products(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with their wrappers fetched where they are beside activations, and none of them is trained."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    wrappers = [value for value in flat if _is_wrapper(value)]
    target = target_of(flat) if wrappers else None
    if target is None or any(_is_trained_wrapper(value) for value in wrappers):
        return args, kwargs
    return pytree.tree_unflatten([fetched(value, target) if _is_wrapper(value) else value for value in flat], spec)


def _below(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with all that is on offload fetched where it is beside activations."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    target = target_of(flat) if any(is_offload(value) for value in flat) else None
    if target is None:
        return args, kwargs
    return pytree.tree_unflatten([fetched_below(value, target) for value in flat], spec)


def _fetching(
    original: classmethod, reads: Callable[[Any], bool], fetch: Callable[[Any, Any], tuple[Any, Any]]
) -> classmethod:
    def method(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reads(func) and not torch.compiler.is_dynamo_compiling():
            args, kwargs = fetch(args, kwargs)
        return original.__get__(None, cls)(func, types, args, kwargs)

    method.__name__ = _MARK
    return classmethod(method)


_MARK = "fetching"


def follow(cls: type) -> None:
    """Called with the class of every wrapper that a module holds on offload: puts the fetch in front of its methods."""
    for name, reads, fetch in (
        ("__torch_function__", _PRODUCTS.__contains__, _products),
        ("__torch_dispatch__", lambda func: not func._schema.is_mutable, _below),
    ):
        owner = next(base for base in cls.__mro__ if name in base.__dict__)
        method = owner.__dict__[name]
        if owner is torch.Tensor or not isinstance(method, classmethod):
            continue  # every tensor's, of which the other one is called
        if method.__func__.__name__ != _MARK:
            setattr(owner, name, _fetching(method, reads, fetch))
