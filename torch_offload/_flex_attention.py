"""``flex_attention`` with offload tensors, of which PyTorch refuses the device before any operation is called.

They are fetched in front of it, with a block mask that is on offload. Where all of them were on offload, so is the result. What
its functions capture is fetched further down (`compile/higher_order.py`).
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_offload import _C
from torch_offload._imports import when_imported
from torch_offload._wrappers import device_for, is_offload, target_of
from torch_offload.compile.fakes import computing


def _on_host() -> bool:
    return _C.HostScope.active()


_on_host._dynamo_marked_constant = True  # as the placement of operations is where they are traced


def _fetching(attend: Callable[..., Any], block_mask: type) -> Callable[..., Any]:
    @functools.wraps(attend)
    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        values = [value.kv_indices if isinstance(value, block_mask) else value for value in given]
        if not any(map(is_offload, values)):
            return attend(*args, **kwargs)
        target = target_of(values)
        home = next(value.device for value in values if is_offload(value)) if target is None else None
        if target is None:
            target = torch.device("cpu") if _on_host() else device_for(values)

        def moved(value: Any) -> Any:
            if isinstance(value, block_mask):
                return value.to(computing(target))
            return torch.ops.offload.fetch(value, target) if is_offload(value) else value

        results = attend(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})
        if home is None:
            return results
        return pytree.tree_map_only(Tensor, lambda value: torch.ops.offload.stash(value, home), results)

    return flex_attention


def _wrap(module: ModuleType) -> None:
    module.flex_attention = _fetching(module.flex_attention, module.BlockMask)


def register() -> None:
    """Takes the function's place, now or when a program imports it."""
    when_imported("torch.nn.attention.flex_attention", _wrap)
