"""What follows when a module is moved: its tensors get names, and compiled code looks at them again."""

import functools
import threading
from typing import Any

import torch

from torch_offload import _C
from torch_offload._names import name_tensors
from torch_offload.compile import moves


class _Depth(threading.local):
    """How many calls of a module's ``_apply`` this thread is in: one for each level of the module."""

    value = 0


def register() -> None:
    """Puts it around ``Module._apply``, for the module that was moved and not for each of its parts."""
    original = torch.nn.Module._apply
    depth = _Depth()

    @functools.wraps(original)
    def _apply(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)  # PyTorch takes no parameter that moves into a graph
        outermost = depth.value == 0
        before = moves.on_offload(self) if outermost else frozenset()
        depth.value += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            depth.value -= 1
            if outermost:
                moves.look_again(self, before)
        if outermost and _C.in_use():
            name_tensors(self, replace=False)
        return result

    # What a graph breaks at is compiled by itself: these are not, and of what they call only what is not ours.
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(_apply.__code__, frames._FrameExecStrategy(skip, default))
    for function in (moves.on_offload, moves.look_again, name_tensors):
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    torch.nn.Module._apply = _apply
