"""``torch.autocast("offload")`` is the autocast of the device that computes."""

import functools
from typing import Any

import torch
from torch.amp import autocast_mode

from torch_offload import _C


def register() -> None:
    """Lets ``torch.autocast`` take ``"offload"`` for the device that ``offload`` is paired with."""
    init = autocast_mode.autocast.__init__

    @functools.wraps(init)
    def with_pair(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "offload":
            device_type = _C.paired_device(0).type
        init(self, device_type, *args, **kwargs)

    autocast_mode.autocast.__init__ = with_pair
