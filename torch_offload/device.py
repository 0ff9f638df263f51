"""The device module ``torch.offload``: what ``torch.cuda`` is to CUDA, for the offload device.

Counts of bytes are of host memory (what offload tensors hold) unless a name says device (the cache on the GPU).
"""

import warnings
from typing import Any

import torch

from torch_offload import _C, _random, _summary, memory
from torch_offload._index import Device as _Device
from torch_offload._index import current_device, device, device_count, device_of, set_device
from torch_offload._index import index_of as _index
from torch_offload._random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_offload._streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    is_current_stream_capturing,
    set_stream,
    stream,
)

_initialized = True
default_generators: tuple[torch.Generator, ...]  # the CPU's default one for each device, as __getattr__ makes them


def __getattr__(name: str) -> Any:
    if name == "default_generators":  # to count the devices is not for the import
        return _random.default_generators()
    if name == "Scheduling":  # inductor's question to a backend, which then registers with more than it is asked for
        from torch_offload.compile import inductor

        inductor.register()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_available() -> bool:
    """Always true: without a GPU the CPU is the compute device."""
    return True


def is_initialized() -> bool:
    """Always true: nothing has to be set up before the first use."""
    return True


def init() -> None:
    """Does nothing: see :func:`is_initialized`."""


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def get_device_name(device: _Device = None) -> str:
    """What ``offload:i`` is paired with, in words."""
    index = _index(device)
    return f"offload ({torch.cuda.get_device_name(index)})" if torch.cuda.is_available() else "offload (CPU)"


def get_device_properties(device: _Device = None) -> Any:
    """The properties of the CUDA device that ``offload:i`` is paired with; None where there is none."""
    index = _index(device)
    return torch.cuda.get_device_properties(index) if torch.cuda.is_available() else None


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    """The compute capability of the CUDA device that ``offload:i`` is paired with; ``(0, 0)`` where there is none."""
    index = _index(device)
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else (0, 0)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the device that computes has bfloat16: true of a CPU."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation)


def synchronize(device: _Device = None) -> None:
    """Waits until every copy to and from offload tensors has landed. No program needs it for its results."""
    _index(device)
    _C.drain()


def empty_cache() -> None:
    """Gives up what nothing uses: the GPU memory of cached copies, and host memory.

    On the GPU that is all but the copies that fetched tensors hold at the moment, what has been copied ahead included. Results
    that the host does not have yet go home first. PyTorch's own unused GPU memory goes back to the driver with it, as at
    ``torch.cuda.empty_cache()``. On the host it is memory that no tensor uses, and the rings that pageable memory is copied
    through. Whatever is needed again is made again; no result depends on it.
    """
    _C.empty_cache()


def memory_stats(device: _Device = None) -> dict[str, Any]:
    """Counters since the process began; peaks since :func:`reset_peak_memory_stats`.

    Returns:
        A value that goes up and down has ``.current`` and ``.peak``, and most have the sums of all that has come,
        ``.allocated``, and gone, ``.freed``. ``host.*``: bytes of host memory that tensors hold (``allocated``), that are held
        from the system (``reserved``), that this process has mapped beside them and may have in common with others
        (``shared``), that are page-locked (``pinned``), that copies of pageable memory and of files go through (``ring``,
        page-locked, too, and in none of the others), and bytes of tensors that are read from files (``file``), which take no
        memory until they are written.
        ``host.*_bytes`` and ``host.*_count`` are bytes and numbers of storages by purpose, and add up to
        ``host.allocated_bytes`` and ``host.allocated_count``: ``parameter`` (what a module holds, or a leaf that requires
        gradients), ``gradient``, ``optimizer`` (its state, from the end of the step that made it on), ``activation``
        (results of operations) and ``temporary`` (everything else). A storage counts in ``.allocated`` as what it turned out to
        be, so these add up, too. ``device.*``: bytes of the cache on the GPU.
        ``cache.*``: fetches, hits and evictions, copies made ahead of a fetch (``prefetches``) and those of them that nobody
        asked for (``prefetches_wasted``). ``link.*``: bytes and copies in each direction. ``host_waits.*``: how often threads
        waited for copies and for files, and for how many seconds. ``host_fallbacks``: how often an operation on offload
        tensors alone had no CUDA kernel and ran on the host, by its name.
    """
    return _C.statistics(_index(device))


def stats(device: _Device = None) -> dict[str, Any]:
    """What moved and what waited since the process began: :func:`memory_stats` without the memory. Subtract two of them.

    Returns:
        ``fetches`` of operations and those of them that were ``hits``; ``evictions``; copies made ahead of a fetch,
        ``prefetches``, and those in vain, ``prefetches_wasted``; ``bytes_to_device``, ``bytes_to_host`` and the
        ``copies_to_device`` and ``copies_to_host`` that these travelled in. Of all devices: ``host_waits``, how often threads
        waited for copies and for files, and ``host_wait_seconds``; ``host_fallbacks``, how often an operation on offload
        tensors alone had no CUDA kernel and ran on the host, by its name.
    """
    everything = memory_stats(device)
    moved = {
        name.partition(".")[2]: value for name, value in everything.items() if name.startswith(("cache.", "link."))
    }
    return moved | {
        "host_waits": everything["host_waits.count"],
        "host_wait_seconds": everything["host_waits.seconds"],
        "host_fallbacks": everything["host_fallbacks"],
    }


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


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Host memory that offload tensors may still take, and all that there is, in bytes; all devices share it.

    Both are what the machine says, or the container where that has less. As with ``torch.cuda``, what is cached (reserved and
    not allocated) is not free: :func:`empty_cache` gives it back. Memory of pageable tensors counts as free until somebody
    writes to it. ``torch.cuda.mem_get_info`` tells the GPU's.

    Returns:
        The free bytes, and the total.
    """
    _index(device)
    return _C.host_memory()


def memory_snapshot() -> list[dict[str, Any]]:
    """The segments of host memory and their blocks: those of ``torch.offload.memory._snapshot()``."""
    return memory._snapshot()["segments"]


def memory_summary(device: _Device = None, abbreviated: bool = False) -> str:
    """:func:`memory_stats` as a table for people, like that of ``torch.cuda``; ``abbreviated`` leaves the parts of sums out."""
    return _summary.table(memory_stats(device), _index(device), get_budget(device), get_ring_bytes(), abbreviated)


def get_ring_bytes() -> int:
    """GPU bytes for what is passing through; 0 without a GPU. What stays has a budget of its own, :func:`get_budget`."""
    return _C.ring_bytes()


def set_ring_bytes(count: int) -> None:
    """Sets :func:`get_ring_bytes`. A fetch may always take twice its own bytes, so that the next one overlaps with it."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"a ring is a number of bytes; got {count!r}.")
    if not 0 <= count < 1 << 63:
        raise ValueError(f"a number of bytes can't be negative, nor 2**63 or more; got {count}.")
    _warn_of("ring", f"{count} bytes", count)
    _C.set_ring_bytes(count)


def get_budget(device: _Device = None) -> int:
    """GPU bytes that the cache may hold beside the ring: weights that stay, and results that the host does not have yet.

    Of an automatic budget this is what it came to when free memory was looked at last, or, before the first fetch, what it
    comes to now: this call sets the GPU up if nothing has yet, as ``torch.cuda.mem_get_info()`` does. 0 without a GPU.
    """
    return _C.budget(_index(device))


def set_budget(budget: int | str | None = "auto") -> None:
    """Sets :func:`get_budget`, for every device.

    Args:
        budget: bytes, a share of the first GPU's memory (``"40%"``), or ``"auto"``, the default: what is free, less a headroom,
            and PyTorch's allocator gets back what it asks for. ``0`` keeps nothing on the GPU beyond the ring. The variable
            ``TORCH_OFFLOAD_BUDGET`` takes the same.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | str | None):
        raise ValueError(f'a budget is a number of bytes, a share like "40%", or "auto"; got {budget!r}.')
    text = "auto" if budget is None else str(budget)
    count = _C.budget_of(text)
    if count is not None:
        _warn_of("budget", text if text.endswith("%") else f"{count} bytes", count)
    _C.set_budget(count)


def _warn_of(what: str, said: str, count: int) -> None:
    if problem := _C.problem_of(what, said, count):
        warnings.warn(problem, stacklevel=3)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast`` may cast to."""
    return [torch.float16, torch.bfloat16]


__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_budget",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_ring_bytes",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_budget",
    "set_device",
    "set_ring_bytes",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stats",
    "stream",
    "synchronize",
]
