"""``share_memory_()`` and ``torch.multiprocessing``: one copy of a tensor's bytes for several processes.

A shared storage is a file descriptor to others, whatever the sharing strategy of ``torch.multiprocessing``: there are no names
of files that somebody has to clean up, and the memory goes with the last process that uses it. See docs/design/sharing.md.
"""

import functools
import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_offload import _C


def _rebuild(descriptor: Any, index: int) -> torch.UntypedStorage:
    _C.require_descriptor()  # what can't be received is lost
    received = descriptor.detach()
    key = reductions.fd_id(received)
    known = reductions.storage_from_cache(torch.UntypedStorage, key)
    if known is not None:
        os.close(received)
        return known
    storage = _C.open_shared(received, index)
    reductions.shared_cache[key] = reductions.StorageWeakRef(storage)
    return storage


def _rebuild_empty(index: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device=torch.device("offload", index))


def _reduce(storage: torch.UntypedStorage) -> tuple[Callable[..., torch.UntypedStorage], tuple[Any, ...]]:
    index = storage.device.index
    if storage.nbytes() == 0:
        return _rebuild_empty, (index,)
    descriptor = _C.shared_descriptor(storage.share_memory_())
    _C.require_descriptor()  # until it is received there may be another one for it
    # As PyTorch does for CPU storages: one that comes back is this one.
    reductions.shared_cache[reductions.fd_id(descriptor)] = reductions.StorageWeakRef(storage)
    return _rebuild, (reduction.DupFd(descriptor), index)


def _is_offload(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "offload"


def _register_methods() -> None:
    # PyTorch takes memory of every PrivateUse1 device for memory that other processes can open.
    storage_share, storage_is_shared = torch.UntypedStorage.share_memory_, torch.UntypedStorage.is_shared

    @torch.storage._share_memory_lock_protected
    def share(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        _C.share(storage)
        return storage

    @functools.wraps(storage_share)
    def share_memory_(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return share(self) if _is_offload(self) else storage_share(self)

    @functools.wraps(storage_is_shared)
    def is_shared(self: torch.UntypedStorage) -> bool:
        return _C.is_shared(self) if _is_offload(self) else storage_is_shared(self)

    torch.UntypedStorage.share_memory_ = share_memory_
    torch.UntypedStorage.is_shared = is_shared


def _register_reducer() -> None:
    # Tensors, Parameters and typed storages of every device are sent as what is particular to them, and an untyped storage.
    reducers = reduction.ForkingPickler._extra_reducers
    storage_reduce = reducers[torch.UntypedStorage]

    def reduce(storage: torch.UntypedStorage) -> Any:
        return _reduce(storage) if _is_offload(storage) else storage_reduce(storage)

    reduction.register(torch.UntypedStorage, reduce)


def register() -> None:
    """Teaches PyTorch to share offload storages between processes, and leaves those of other devices as they were."""
    _register_methods()
    _register_reducer()
