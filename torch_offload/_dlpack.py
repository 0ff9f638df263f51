"""DLPack has no such device: who asks an offload tensor for its memory is told to copy it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from torch_offload import _C

_TABLE = "__dlpack_c_exchange_api__"


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def export(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.in_use():
            _C.refuse_dlpack(self)
        return method(self, *args, **kwargs)

    return export


def register() -> None:
    """Wraps what a consumer of DLPack calls: two methods, the function of the same end, and a table of C functions."""
    torch.Tensor.__dlpack__ = _refusing(torch.Tensor.__dlpack__)
    torch.Tensor.__dlpack_device__ = _refusing(torch.Tensor.__dlpack_device__)
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = _refusing(torch.utils.dlpack.to_dlpack)
    if (table := getattr(torch.Tensor, _TABLE, None)) is not None:
        setattr(torch.Tensor, _TABLE, _C.guarded_dlpack_table(table))
