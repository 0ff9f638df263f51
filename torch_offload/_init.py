"""``torch.nn.init`` runs on the host, so that a seed gives an offload model the initial weights of a CPU model.

Filling in place does so anyway; the decomposition in ``orthogonal_`` would be made on the paired device.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_offload._scopes import on_host


def _hosted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def initialize(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = args[0] if args else kwargs.get("tensor")
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "offload":
            return function(*args, **kwargs)
        with on_host():
            return function(*args, **kwargs)

    return initialize


def register() -> None:
    """Wraps the initializations that compute new values on the way."""
    torch.nn.init.orthogonal_ = _hosted(torch.nn.init.orthogonal_)
