"""``torch.inference_mode()`` inside of what is compiled.

A graph is traced below it without autograd's keys, on one of which fetches are put in: operations would meet two devices. So
while a graph is traced ``torch.no_grad()`` stands in. What a graph returns is no inference tensor on any device.
"""

import functools
from typing import Any

import torch
from torch.autograd import grad_mode

from torch_offload import _C

_MODES = ("FUNCTIONAL", "PROXY", "FAKE")


def _is_traced() -> bool:
    keys = (getattr(torch._C._TorchDispatchModeKey, name) for name in _MODES)
    return any(torch._C._get_dispatch_mode(key) is not None for key in keys)


def register() -> None:
    """Takes the place of what Dynamo's graphs call to enter the mode."""
    enter = grad_mode._enter_inference_mode

    @functools.wraps(enter)
    def enter_or_stand_in(mode: bool) -> Any:
        if not mode or not _C.in_use() or not _is_traced():
            return enter(mode)
        context = torch.no_grad()
        context.__enter__()
        return context

    grad_mode._enter_inference_mode = enter_or_stand_in
