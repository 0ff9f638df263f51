"""``torch.nn.init`` runs on the host, so that a seed gives an offload model the initial weights of a CPU model.

Filling in place does so anyway; the decomposition in ``orthogonal_`` would be made on the paired device.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_offload import _C
from torch_offload._scopes import on_host
from torch_offload._wrappers import is_offload


def _hosted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def initialize(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = args[0] if args else kwargs.get("tensor")
        if not (torch.compiler.is_dynamo_compiling() or _C.in_use()) or not is_offload(tensor):
            return function(*args, **kwargs)
        with on_host():
            return function(*args, **kwargs)

    return initialize


def register() -> None:
    """Wraps the initializations that compute new values on the way."""
    torch.nn.init.orthogonal_ = _hosted(torch.nn.init.orthogonal_)
