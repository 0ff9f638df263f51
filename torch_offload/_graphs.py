"""CUDA graphs with fetches of offload tensors: ``torch.cuda.CUDAGraph`` tells of its captures and of its replays.

A graph copies from host memory as a kernel of it reads it, behind PyTorch's back; what comes before a replay, and after it, is
arranged here. All that captures goes by this class: ``torch.cuda.graph``, ``make_graphed_callables``, ``torch.compile``.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_offload import _C

_FETCHES = "_offload_fetches"


def _begins(capture_begin: Callable[..., None], capture_end: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(capture_begin)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        capture_begin(self, *args, **kwargs)
        self.__dict__.pop(_FETCHES, None)
        if _C.captures_graphs():
            try:
                self.__dict__[_FETCHES] = _C.CapturedGraph(torch.cuda.current_device())
            except BaseException:
                capture_end(self)
                raise

    return begin


def _ends(capture_end: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(capture_end)
    def end(self: Any) -> None:
        fetches = self.__dict__.pop(_FETCHES, None)
        if fetches is not None:
            fetches.end()
        capture_end(self)
        if fetches is not None and fetches.tensors:
            self.__dict__[_FETCHES] = fetches

    return end


def _replays(replay: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(replay)
    def launch(self: Any) -> None:
        fetches = self.__dict__.get(_FETCHES)
        if fetches is None:
            return replay(self)
        fetches.begin_replay()
        try:
            replay(self)
        finally:
            fetches.end_replay()

    return launch


def _resets(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(reset)
    def forget(self: Any) -> None:
        reset(self)
        self.__dict__.pop(_FETCHES, None)

    return forget


def register() -> None:
    """Follows every graph from now on."""
    graph = torch.cuda.CUDAGraph
    graph.capture_begin = _begins(graph.capture_begin, graph.capture_end)
    graph.capture_end = _ends(graph.capture_end)
    graph.replay = _replays(graph.replay)
    graph.reset = _resets(graph.reset)
