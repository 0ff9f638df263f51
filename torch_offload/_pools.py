"""Pools that PyTorch's allocator serves a thread from: what the cache takes meanwhile is not for them.

``torch.cuda.use_mem_pool`` sends all requests of a thread to a pool, and so do the CUDA graphs of ``torch.compile`` while they
warm up, which then count what is left in it. The cache's memory outlives both. The allocator tells nobody who is served so, so
the calls with which this begins and ends are followed.
"""

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_offload import _C


class _Pools(threading.local):
    def __init__(self) -> None:
        self.current: list[Any] = []  # (device, pool)


_pools = _Pools()
_BEGIN, _END = "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"


def _begins(begin: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    @functools.wraps(begin)
    def begin_to_pool(device: int, pool: Any) -> None:
        begin(device, pool)
        _pools.current.append((device, pool))
        _C.set_thread_has_pool(True)

    return begin_to_pool


def _ends(end: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    @functools.wraps(end)
    def end_to_pool(device: int, pool: Any) -> None:
        end(device, pool)
        if (device, pool) in _pools.current:  # or it was one for all threads, of a capture
            _pools.current.remove((device, pool))
            _C.set_thread_has_pool(bool(_pools.current))

    return end_to_pool


def follow(modules: list[ModuleType]) -> None:
    """Puts what is followed in place of the allocator's functions, wherever these modules have them."""
    for name, followed in ((_BEGIN, _begins), (_END, _ends)):
        function = followed(getattr(modules[0], name))
        for module in modules:
            setattr(module, name, function)


def register() -> None:
    """Follows the allocator's pools from now on; a PyTorch without CUDA has none."""
    if torch.version.cuda:
        follow([torch._C, torch.cuda.memory])
