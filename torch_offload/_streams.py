"""Streams and events of ``torch.offload``, for code that asks the module of whatever device it is given.

Host memory has no queue: what is done to an offload tensor is done in the order of the program, and what a GPU does for it is
ordered with the paired device's streams by the package itself. So each device has one stream, nothing has to be selected, and
no program needs to wait for its results. To compute on another stream of the GPU, say ``torch.cuda.stream(...)``: operations on
offload tensors follow it.
"""

import torch

from torch_offload import _C
from torch_offload._index import Device, Entered, index_of


class _OfOffload(type):
    """The type of classes whose instances are PyTorch's own objects, where they are of an offload device."""

    def __instancecheck__(cls, value: object) -> bool:
        return any(isinstance(value, base) for base in cls.__bases__) and _is_offload(value)

    def __subclasscheck__(cls, other: type) -> bool:
        return other is cls


def _is_offload(value: torch.Stream | torch.Event) -> bool:
    return value.device is not None and value.device.type == "offload"


class Stream(torch.Stream, metaclass=_OfOffload):
    """The one stream of a device: every call returns an equal one, which is a ``torch.Stream``.

    ``query()`` is true, since whatever reads an offload tensor waits for the bytes that it reads; ``wait_stream()`` and
    ``wait_event()`` have nothing to wait for; ``synchronize()`` is that of the device.

    Args:
        device: an offload device or an index; the current one if it is left out.
        priority: taken for the sake of callers, without effect.
    """

    def __new__(cls, device: Device = None, priority: int = 0) -> "Stream":
        return torch.Stream(device=torch.device("offload", index_of(device)), priority=priority)


class Event(torch.Event, metaclass=_OfOffload):
    """A point in a program; a ``torch.Event``.

    One that measures time is an event on the current stream of the paired device, where the work is that shall be measured, and
    the time on the clock where the host computes; ``query()``, ``synchronize()``, ``wait()`` and ``elapsed_time()``
    (milliseconds) answer for that. Any other has nothing to order: ``query()`` is true, ``wait()`` does nothing, and
    ``synchronize()`` waits as that of the device does.

    Args:
        enable_timing: whether :meth:`elapsed_time` may be asked for.
        blocking: taken for the sake of callers, without effect.
        interprocess: events of offload can't be sent to other processes, and PyTorch says so when it is tried.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return torch.Event("offload", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def _checked(stream: torch.Stream) -> torch.Stream:
    if not isinstance(stream, torch.Stream):
        raise TypeError(f"expected a torch.Stream and got {type(stream).__name__}.")
    if stream.device.type != "offload":
        kind = stream.device.type
        raise ValueError(
            f"expected a stream of an offload device and got one of {stream.device}; see torch.{kind}.stream."
        )
    return stream


class StreamContext:
    """What :func:`stream` returns."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = None if stream is None else _checked(stream)
        self._entered = Entered()

    def __enter__(self) -> None:
        self._entered.enter()
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        self._entered.leave()


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which a stream, and with it its device, is the current one; None changes nothing.

    A device has one stream: operations run where and when they would without it.
    """
    return StreamContext(stream)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes a stream, and with it its device, the current one; None changes nothing. See :func:`stream`."""
    if stream is not None:
        _C.set_device(_checked(stream).device_index)


def current_stream(device: Device = None) -> torch.Stream:
    """The one stream of the device."""
    return Stream(device)


def default_stream(device: Device = None) -> torch.Stream:
    """The one stream of the device."""
    return Stream(device)


def is_current_stream_capturing() -> bool:
    """Whether a CUDA graph is being captured on the stream that computes, which fetches of offload tensors become part of."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
