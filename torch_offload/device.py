"""The device module ``torch.offload``: what ``torch.cuda`` is to CUDA, for the offload device.

Counts of bytes are of host memory (what offload tensors hold) unless a name says device (the cache on the GPU).
"""

import contextlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from torch_offload import _C, _summary, memory

_initialized = True
_Device = torch.device | int | str | None


def _index(device: _Device) -> int:
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


def is_available() -> bool:
    """Always true: without a GPU the CPU is the compute device."""
    return True


def is_initialized() -> bool:
    """Always true: nothing has to be set up before the first use."""
    return True


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """The number of devices ``offload:i``: one for each CUDA device, at least one."""
    return _C.device_count()


def current_device() -> int:
    """The index that ``"offload"`` stands for on this thread."""
    return _C.current_device()


def set_device(device: _Device) -> None:
    """Sets the index that ``"offload"`` stands for on this thread."""
    _C.set_device(_index(device))


class device(contextlib.ContextDecorator):  # noqa: N801 - named as torch.cuda.device is
    """A context in which ``"offload"`` stands for another index on this thread.

    Args:
        device: an offload device, an index, or None for no change.
    """

    def __init__(self, device: _Device) -> None:
        self._to = _index(device)
        self._back: list[int] = []

    def __enter__(self) -> "device":
        self._back.append(current_device())
        _C.set_device(self._to)
        return self

    def __exit__(self, *_: object) -> None:
        _C.set_device(self._back.pop())


def get_device_name(device: _Device = None) -> str:
    """What ``offload:i`` is paired with, in words."""
    index = _index(device)
    return f"offload ({torch.cuda.get_device_name(index)})" if torch.cuda.is_available() else "offload (CPU)"


def get_device_properties(device: _Device = None) -> Any:
    """The properties of the CUDA device that ``offload:i`` is paired with; None where there is none."""
    index = _index(device)
    return torch.cuda.get_device_properties(index) if torch.cuda.is_available() else None


def current_stream(device: _Device = None) -> torch.Stream:
    """The one stream of the device. It orders nothing: the order of copies is kept on the streams of the paired device."""
    return torch.Stream(device=torch.device("offload", _index(device)))


def synchronize(device: _Device = None) -> None:
    """Waits until every copy to and from offload tensors has landed. No program needs it for its results."""
    _index(device)
    _C.drain()


def empty_cache() -> None:
    """Gives up cached copies on the GPU, and returns host memory that no tensor uses to the system."""
    _C.empty_cache()


def memory_stats(device: _Device = None) -> dict[str, Any]:
    """Counters since the process began; peaks since :func:`reset_peak_memory_stats`.

    Returns:
        ``host.*``: bytes of host memory that tensors hold (``allocated``), that are held from the system (``reserved``), that
        this process has mapped beside them and may have in common with others (``shared``), that are page-locked
        (``pinned``), and bytes of tensors that are read from files (``file``), which take no memory until they are written.
        ``host.*_bytes`` and ``host.*_count`` are bytes and numbers of storages by purpose, and add up to
        ``host.allocated_bytes`` and ``host.allocated_count``: ``parameter`` (what a module holds, or a leaf that requires
        gradients), ``gradient``, ``optimizer`` (its state, from the end of the step that made it on), ``activation``
        (results of operations) and ``temporary`` (everything else). ``device.*``: bytes of the cache on the GPU.
        ``cache.*``: fetches, hits and evictions, copies made ahead of a fetch (``prefetches``) and those of them that nobody
        asked for (``prefetches_wasted``). ``link.*``: bytes and copies in each direction. ``host_fallbacks``: how often
        an operation on offload tensors alone had no CUDA kernel and ran on the host, by its name.
    """
    return _C.statistics(_index(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Makes every peak the current value."""
    _C.reset_peaks(_index(device))


def memory_allocated(device: _Device = None) -> int:
    """Bytes of host memory that offload tensors hold."""
    return memory_stats(device)["host.allocated_bytes.current"]


def max_memory_allocated(device: _Device = None) -> int:
    """The peak of :func:`memory_allocated`."""
    return memory_stats(device)["host.allocated_bytes.peak"]


def memory_reserved(device: _Device = None) -> int:
    """Bytes of host memory held from the system, in use and cached."""
    return memory_stats(device)["host.reserved_bytes.current"]


def max_memory_reserved(device: _Device = None) -> int:
    """The peak of :func:`memory_reserved`."""
    return memory_stats(device)["host.reserved_bytes.peak"]


def memory_snapshot() -> list[dict[str, Any]]:
    """The segments of host memory and their blocks: those of ``torch.offload.memory._snapshot()``."""
    return memory._snapshot()["segments"]


def memory_summary(device: _Device = None) -> str:
    """:func:`memory_stats` as a table for people, like that of ``torch.cuda``."""
    return _summary.table(memory_stats(device), _index(device), get_budget(device), get_ring_bytes())


def get_ring_bytes() -> int:
    """GPU bytes for what is passing through; 0 without a GPU. What stays has a budget of its own, :func:`get_budget`."""
    return _C.ring_bytes()


def set_ring_bytes(count: int) -> None:
    """Sets :func:`get_ring_bytes`. A fetch may always take twice its own bytes, so that the next one overlaps with it."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"a ring is a number of bytes; got {count!r}.")
    if not 0 <= count < 1 << 63:
        raise ValueError(f"a number of bytes can't be negative, nor 2**63 or more; got {count}.")
    _warn_of("ring", count)
    _C.set_ring_bytes(count)


def get_budget(device: _Device = None) -> int:
    """GPU bytes that the cache may hold beside the ring: weights that stay, and results that the host does not have yet.

    Of an automatic budget this is what it comes to now. 0 without a GPU.
    """
    return _C.budget(_index(device))


def set_budget(budget: int | str | None = "auto") -> None:
    """Sets :func:`get_budget`, for every device.

    Args:
        budget: bytes, a share of the first GPU's memory (``"40%"``), or ``"auto"``, the default: what is free, less a headroom,
            and PyTorch's allocator gets back what it asks for. ``0`` keeps nothing on the GPU beyond the ring.

    Raises:
        ValueError: for anything else.
    """
    count = _bytes_of(budget)
    if count is not None:
        _warn_of("budget", count)
    _C.set_budget(count)


def _warn_of(what: str, count: int) -> None:
    if problem := _C.problem_of(what, count):
        warnings.warn(problem, stacklevel=3)


def _bytes_of(budget: int | str | None) -> int | None:
    if budget is None or budget == "auto":
        return None
    if isinstance(budget, int) and not isinstance(budget, bool) and 0 <= budget < 1 << 63:
        return budget
    share = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", budget) if isinstance(budget, str) else None
    if share is None or float(share[1]) > 100:
        raise ValueError(f'a budget is a number of bytes, a share like "40%", or "auto"; got {budget!r}.')
    if not torch.cuda.is_available():
        return 0
    return int(float(share[1]) / 100 * torch.cuda.get_device_properties(0).total_memory)


def _cuda_states() -> Iterable[int]:
    return range(torch.cuda.device_count()) if torch.cuda.is_available() else ()


def manual_seed(seed: int) -> None:
    """Seeds what offload tensors draw from: the CPU's generator, which is shared with CPU tensors."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """The same for every index, which all share one generator. ``torch.manual_seed`` has done it already."""


def seed() -> int:
    """Seeds from the system's randomness; the new seed."""
    return torch.default_generator.seed()


def initial_seed() -> int:
    """The seed of the generator."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """The state of what operations on offload tensors draw from: the CPU's generator, and the paired CUDA device's after it.

    Returns:
        A CPU tensor of dtype uint8, for :func:`set_rng_state`.
    """
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state(_index(device)))
    return torch.cat(states)


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    """Restores a state of :func:`get_rng_state`."""
    length = torch.default_generator.get_state().numel()
    if new_state.dtype != torch.uint8 or new_state.numel() < length:
        raise ValueError(
            f"expected a state of get_rng_state(), uint8 of {length} or more; got {tuple(new_state.shape)}."
        )
    torch.default_generator.set_state(new_state[:length].clone())
    if new_state.numel() > length and torch.cuda.is_available():
        torch.cuda.set_rng_state(new_state[length:].clone(), _index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast`` may cast to."""
    return [torch.float16, torch.bfloat16]
