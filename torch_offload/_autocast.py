"""Autocast: ``offload`` answers for the device that computes.

``torch.autocast("offload")`` is the autocast of that device, and within that device's autocast
``torch.is_autocast_enabled("offload")`` is true, unless the region was entered before the process had offload tensors: code
that asks for the device of its inputs (checkpointing) finds what it needs. What ``torch.amp.custom_fwd`` casts for a function
on that device, it casts of offload tensors, too.
"""

import functools
from typing import Any

import torch
from torch.amp import autocast_mode

from torch_offload import _C
from torch_offload._wrappers import is_offload


def _state() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("offload"), torch.get_autocast_dtype("offload")


def _set(enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled("offload", enabled)
    torch.set_autocast_dtype("offload", dtype)


def register() -> None:
    """Lets ``torch.autocast`` take ``"offload"`` for its pair, and mirrors the pair's state."""
    autocast = autocast_mode.autocast
    init, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__

    @functools.wraps(init)
    def init_with_pair(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "offload":
            device_type = _C.paired_device(0).type
        init(self, device_type, *args, **kwargs)

    @functools.wraps(enter)
    def enter_and_mirror(self: torch.autocast) -> Any:
        result = enter(self)
        if _C.in_use() and self.device == _C.paired_device(0).type:
            self._offload_before = _state()
            _set(torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device))
        return result

    @functools.wraps(leave)
    def leave_and_mirror(self: torch.autocast, *args: Any) -> Any:
        before = self.__dict__.pop("_offload_before", None)
        if before is not None:
            _set(*before)
        return leave(self, *args)

    cast = autocast_mode._cast  # calls itself by this name, for what is in lists and the like

    @functools.wraps(cast)
    def cast_with_pair(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        if device_type == "offload":
            device_type = _C.paired_device(0).type
        if not is_offload(value):
            return cast(value, device_type, dtype)
        casts = device_type == _C.paired_device(0).type and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if casts else value

    autocast_mode._cast = cast_with_pair
    autocast.__init__, autocast.__enter__, autocast.__exit__ = init_with_pair, enter_and_mirror, leave_and_mirror
