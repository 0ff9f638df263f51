"""DLPack has no such device: who asks an offload tensor for its memory is told to copy it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from torch_offload import _C
from torch_offload._wrappers import is_offload


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def export(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.in_use() and is_offload(self):
            raise BufferError(
                f"offload: a tensor of shape {list(self.shape)} on {self.device} can't be handed over through DLPack, which "
                "has no such device; hand over a copy, tensor.cpu()."
            )
        return method(self, *args, **kwargs)

    return export


def register() -> None:
    """Wraps the two methods that a consumer of DLPack calls, and the function of the same end."""
    torch.Tensor.__dlpack__ = _refusing(torch.Tensor.__dlpack__)
    torch.Tensor.__dlpack_device__ = _refusing(torch.Tensor.__dlpack_device__)
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = _refusing(torch.utils.dlpack.to_dlpack)
