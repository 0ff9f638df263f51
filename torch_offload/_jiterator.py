"""Kernels of ``torch.cuda.jiterator``, which are launched past PyTorch's dispatcher: their offload operands are fetched before.

A result is where that of any operation is: beside activations where they are, and otherwise on offload.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.cuda import jiterator

from torch_offload._wrappers import device_for, fetched, is_offload, target_of


def _guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def launch(self: Any, *tensors: Any, **kwargs: Any) -> Any:
        operands = [value for value in tensors if is_offload(value)]
        if not operands:
            return call(self, *tensors, **kwargs)
        device, home = device_for(tensors), operands[0].device
        with torch.no_grad():  # it has no derivative
            results = call(self, *[fetched(value, device) for value in tensors], **kwargs)
            if target_of(tensors) is not None:
                return results
            if isinstance(results, Tensor):
                return torch.ops.offload.give(results, home)
            return type(results)(torch.ops.offload.give(result, home) for result in results)

    return launch


def register() -> None:
    """Guards every kernel's launch."""
    jiterator._JittedFunction.__call__ = _guarded(jiterator._JittedFunction.__call__)
