"""Which of the devices ``offload:i`` is meant, and which one ``"offload"`` stands for."""

import operator
import threading

import torch

from torch_offload import _C
from torch_offload._scopes import Decorator

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
    if isinstance(device, str | torch.device):
        device = torch.device(device)
        if device.type != "offload":
            raise ValueError(f"expected an offload device and got {device}; say 'offload' or 'offload:i'.")
        device = current_device() if device.index is None else device.index
    device = _number(device)
    if not 0 <= device < device_count():
        raise ValueError(f"there is no device offload:{device}; this machine has {device_count()}, counted from 0.")
    return device


def _number(device: Device) -> int:
    try:
        return int(operator.index(device))
    except TypeError:
        raise TypeError(f"expected an offload device or an index and got {device!r}.") from None


def _index_to_set(device: Device) -> int | None:
    """None for what changes nothing, as ``torch.cuda`` has it: None, and a negative index."""
    if device is None or (not isinstance(device, str | torch.device) and _number(device) < 0):
        return None
    return index_of(device)


def set_device(device: Device) -> None:
    """Sets the index that ``"offload"`` stands for on this thread.

    Args:
        device: an offload device or an index; nothing is changed by None, or by a negative index.
    """
    index = _index_to_set(device)
    if index is not None:
        _C.set_device(index)


class Entered(threading.local):
    """The devices to go back to where a context is left, which each thread may enter several times."""

    def __init__(self) -> None:
        self.devices: list[int] = []

    def enter(self) -> None:
        self.devices.append(current_device())

    def leave(self) -> None:
        _C.set_device(self.devices.pop())


class device(Decorator):  # noqa: N801 - named as torch.cuda.device is
    """A context in which ``"offload"`` stands for another index on this thread. May be used as a decorator.

    Args:
        device: an offload device or an index; nothing is changed by None, or by a negative index.
    """

    def __init__(self, device: Device) -> None:
        self._to = _index_to_set(device)
        self._entered = Entered()

    def __enter__(self) -> "device":
        self._entered.enter()
        if self._to is not None:
            _C.set_device(self._to)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.leave()


class device_of(device):  # noqa: N801 - named as torch.cuda.device_of is
    """:class:`device` of a tensor or storage; no change where that is on another kind of device.

    Args:
        obj: a tensor or a storage.
    """

    def __init__(self, obj: torch.Tensor | torch.UntypedStorage | torch.TypedStorage) -> None:
        super().__init__(obj.device if obj.device.type == "offload" else None)
