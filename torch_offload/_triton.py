"""Raw launches of Triton kernels: their offload arguments are fetched before, and what these have become comes home after.

A launch takes the address of every tensor, and page-locked host memory can be read and written through it: behind the versions
of cached copies, and while copies of it are on their way. PyTorch sees nothing of a launch, so it is Triton's that is guarded.
"""

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_offload import _C
from torch_offload._imports import when_imported
from torch_offload._wrappers import device_for, is_offload


def _any_offload(values: Iterable[Any]) -> bool:
    """Also within tuples. Called at every launch of a program that has offload tensors."""
    return any(_any_offload(value) if isinstance(value, (tuple, list)) else is_offload(value) for value in values)


class _Work:
    """All bytes of an offload storage, in memory of the device that a kernel may write to."""

    def __init__(self, offload: Tensor, device: torch.device) -> None:
        self._home = torch.empty(0, dtype=torch.uint8, device=offload.device).set_(offload.untyped_storage())
        self._work = torch.ops.offload.fetch(self._home, device).clone()

    def like(self, offload: Tensor) -> Tensor:
        place = offload.storage_offset(), offload.size(), offload.stride()
        return torch.empty(0, dtype=offload.dtype, device=self._work.device).set_(self._work.untyped_storage(), *place)

    def bring_home(self) -> None:
        self._home.copy_(self._work)


def _launch_fetched(run: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    values, spec = pytree.tree_flatten((args, kwargs))
    device = device_for(values)
    if device == torch.device("cpu"):
        return run(*args, **kwargs)  # Triton's own error: no kernel runs there
    works: dict[int, _Work] = {}  # by storage: views of one stay views of one

    def given(value: Any) -> Any:
        if not is_offload(value):
            return value
        key = value.untyped_storage()._cdata
        if key not in works:
            works[key] = _Work(value, device)
        return works[key].like(value)

    with torch.no_grad():
        args, kwargs = pytree.tree_unflatten([given(value) for value in values], spec)
        result = run(*args, **kwargs)
        if not kwargs.get("warmup"):
            for work in works.values():
                work.bring_home()
    return result


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _C.in_use() or not (_any_offload(args) or _any_offload(kwargs.values())):
            return run(self, *args, **kwargs)
        return _launch_fetched(functools.partial(run, self), args, kwargs)

    return launch


def _guard(triton_jit: ModuleType) -> None:
    triton_jit.JITFunction.run = _guarded(triton_jit.JITFunction.run)


def register() -> None:
    """Guards Triton's launch, now or when Triton is imported."""
    when_imported("triton.runtime.jit", _guard)
