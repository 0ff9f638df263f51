"""Which of the devices ``offload:i`` is meant, and which one ``"offload"`` stands for."""

import contextlib

import torch

from torch_offload import _C

Device = torch.device | int | str | None


def device_count() -> int:
    """The number of devices ``offload:i``: one for each CUDA device, at least one."""
    return _C.device_count()


# As torch.compiler.assume_constant_result() does, which imports the compiler: graphs may hold the number.
device_count._dynamo_marked_constant = True


def current_device() -> int:
    """The index that ``"offload"`` stands for on this thread."""
    return _C.current_device()


def index_of(device: Device) -> int:
    """The index of an offload device; of None, and of ``"offload"``, the current one."""
    if device is None:
        return current_device()
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "offload":
            raise ValueError(f"expected an offload device and got {device}; say 'offload' or 'offload:i'.")
        device = current_device() if device.index is None else device.index
    if not 0 <= device < device_count():
        raise ValueError(f"there is no device offload:{device}; this machine has {device_count()}, counted from 0.")
    return device


def set_device(device: Device) -> None:
    """Sets the index that ``"offload"`` stands for on this thread."""
    _C.set_device(index_of(device))


class device(contextlib.ContextDecorator):  # noqa: N801 - named as torch.cuda.device is
    """A context in which ``"offload"`` stands for another index on this thread.

    Args:
        device: an offload device, an index, or None for no change.
    """

    def __init__(self, device: Device) -> None:
        self._to = None if device is None else index_of(device)
        self._back: list[int] = []

    def __enter__(self) -> "device":
        self._back.append(current_device())
        if self._to is not None:
            _C.set_device(self._to)
        return self

    def __exit__(self, *_: object) -> None:
        _C.set_device(self._back.pop())


class device_of(device):  # noqa: N801 - named as torch.cuda.device_of is
    """:class:`device` of a tensor or storage; no change where that is on another kind of device.

    Args:
        obj: a tensor or a storage.
    """

    def __init__(self, obj: torch.Tensor | torch.UntypedStorage | torch.TypedStorage) -> None:
        super().__init__(obj.device if obj.device.type == "offload" else None)
