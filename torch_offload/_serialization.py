"""``torch.save`` and ``torch.load``: files that open without this package. ``pickle``: what comes back is on offload."""

import functools
import io
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import warn_if_has_hooks

from torch_offload import _C


class _Writing(threading.local):
    """Whether this thread is in ``torch.save``."""

    file = False


_writing = _Writing()


class _Saved:
    """The device of a wrapper (tensor subclass) in what it is rebuilt from: to a file the CPU, to a pickle or a copy itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return torch.device, ("cpu" if _writing.file else str(self.device),)


def _tag(storage: torch.UntypedStorage) -> str | None:
    return "cpu" if storage.device.type == "offload" else None


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if location != "offload" and not location.startswith("offload:"):
        return None
    return storage.to(device=torch.device(location))


def _follow_tensors_without_storage() -> None:
    """A wrapper has none that tells where it lives: its device is written beside it. A sparse tensor is its parts."""
    reduce, locate = torch.Tensor._reduce_ex_internal, torch._utils._get_restore_location

    @functools.wraps(reduce)
    def _reduce_ex_internal(self: torch.Tensor, proto: int) -> tuple[Any, tuple[Any, ...]]:
        if _C.in_use() and self.layout is torch.sparse_coo and self.device.type == "offload":
            warn_if_has_hooks(self)
            parts = self._indices(), self._values(), self.size(), self.is_coalesced()
            return torch._utils._rebuild_sparse_tensor, (self.layout, parts)
        rebuild, args = reduce(self, proto)
        if rebuild is torch._utils._rebuild_wrapper_subclass and self.device.type == "offload":
            args = tuple(_Saved(value) if isinstance(value, torch.device) else value for value in args)
        return rebuild, args

    @functools.wraps(locate)
    def _get_restore_location(device: Any) -> Any:
        if isinstance(device, _Saved):
            return device.device
        location = locate(device)
        # As its parts have it: with an index.
        return torch.empty(0, device=location).device if str(location) == "offload" else location

    torch.Tensor._reduce_ex_internal = _reduce_ex_internal
    torch._utils._get_restore_location = _get_restore_location


def _mark_writing(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def marked(*args: Any, **kwargs: Any) -> None:
        before, _writing.file = _writing.file, True
        try:
            write(*args, **kwargs)
        finally:
            _writing.file = before

    return marked


def _load_storage(data: bytes, location: str) -> torch.TypedStorage | torch.UntypedStorage:
    return torch.load(io.BytesIO(data), map_location=location, weights_only=False)


def _reduced(kind: type, zipped: bool) -> None:
    reduce = kind.__reduce__

    @functools.wraps(reduce)
    def reduce_with_device(self: torch.TypedStorage | torch.UntypedStorage) -> tuple[Any, tuple[Any, ...]]:
        device = (self if zipped else self._untyped_storage).device
        if device.type != "offload":
            return reduce(self)
        file = io.BytesIO()
        torch.save(self, file, _use_new_zipfile_serialization=zipped)
        return _load_storage, (file.getvalue(), str(device))

    kind.__reduce__ = reduce_with_device


def _follow_pickle() -> None:
    """A storage within a pickle is a file of its own, which says nothing of the device: that is written beside it."""
    _reduced(torch.TypedStorage, zipped=False)
    _reduced(torch.UntypedStorage, zipped=True)  # which the old format holds only as part of a tensor
    for name in ("_save", "_legacy_save"):
        setattr(torch.serialization, name, _mark_writing(getattr(torch.serialization, name)))


def register() -> None:
    """Offload storages are written to files as the CPU's; ``map_location="offload"`` brings them back."""
    # Before PyTorch's own entry for PrivateUse1 devices, whose tag needs this package to open.
    torch.serialization.register_package(15, _tag, _restore)
    _follow_tensors_without_storage()
    _follow_pickle()
