"""CUDA graphs with fetches of offload tensors: ``torch.cuda.CUDAGraph`` tells of its captures and of its replays.

A graph copies from host memory as a kernel of it reads it, behind PyTorch's back; what comes before a replay, and after it, is
arranged here. The methods of the C++ class beneath are followed, which ``torch.cuda.graph``, ``make_graphed_callables`` and
``torch.compile`` all end in; so what PyTorch, or a hook, does around a launch is not taken for part of it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_offload import _C

_FETCHES = "_offload_fetches"


def _fetches(graph: Any) -> Any:
    return getattr(graph, "__dict__", {}).get(_FETCHES)


def _begins(capture_begin: Callable[..., None], capture_end: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(capture_begin)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        capture_begin(self, *args, **kwargs)
        try:
            if hasattr(self, "__dict__"):  # else the first fetch is refused
                self.__dict__.pop(_FETCHES, None)
                if _C.captures_graphs():
                    self.__dict__[_FETCHES] = _C.CapturedGraph(torch.cuda.current_device())
        except BaseException:
            capture_end(self)
            raise

    return begin


def _ends(capture_end: Callable[[Any], None]) -> Callable[[Any], None]:
    """A graph whose end has failed may succeed in a second try: what it has captured stays."""

    @functools.wraps(capture_end)
    def end(self: Any) -> None:
        fetches = _fetches(self)
        try:
            capture_end(self)
        finally:
            if fetches is not None:
                fetches.end()
        if fetches is not None and not fetches.tensors:
            self.__dict__.pop(_FETCHES, None)

    return end


def _replays(replay: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(replay)
    def launch(self: Any) -> None:
        fetches = _fetches(self)
        if fetches is None:
            replay(self)
        else:
            fetches.replay(functools.partial(replay, self))

    return launch


def _resets(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(reset)
    def forget(self: Any) -> None:
        reset(self)
        getattr(self, "__dict__", {}).pop(_FETCHES, None)

    return forget


def follow(graph: Any) -> None:
    """Follows every instance of such a class from now on."""
    graph.capture_begin = _begins(graph.capture_begin, graph.capture_end)
    for name in ("capture_end", "capture_end_pre"):  # PyTorch 2.15 ends a capture in two steps
        if hasattr(graph, name):
            setattr(graph, name, _ends(getattr(graph, name)))
    graph.replay = _replays(graph.replay)
    graph.reset = _resets(graph.reset)


def register() -> None:
    """Follows every graph from now on; a PyTorch without CUDA has none."""
    if torch.version.cuda:
        follow(torch._C._CUDAGraph)
