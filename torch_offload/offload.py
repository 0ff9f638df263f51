"""The device module ``torch.offload``: what ``torch.cuda`` is to CUDA, for the offload device.

Dynamo knows a device's module by this module's name. Counts of bytes are of host memory (what offload tensors hold) unless a
name says device (the cache on the GPU).
"""

import warnings
from typing import Any

import torch

from torch_offload import _C, memory, random
from torch_offload._arguments import number_of_bytes
from torch_offload._index import Device as _Device
from torch_offload._index import current_device, device, device_count, device_of, set_device
from torch_offload._index import index_of as _index
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
from torch_offload.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from torch_offload.random import (
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

_initialized = True
default_generators: tuple[torch.Generator, ...]  # the CPU's default one for each device, as __getattr__ makes them


def __getattr__(name: str) -> Any:
    if name == "default_generators":  # to count the devices is not for the import
        return random.default_generators()
    if name == "Scheduling":  # inductor's question to a backend, which then registers with more than it is asked for
        from torch_offload import compile

        compile.register_with_inductor()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_available() -> bool:
    """True, also without a GPU: then the CPU computes.

    ``torch.distributed.checkpoint``, which picks a device by this, is told False.
    """
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


is_bf16_supported._dynamo_marked_constant = True  # graphs may hold it, as they may device_count()


def synchronize(device: _Device = None) -> None:
    """Waits until every copy to and from offload tensors has landed. No program needs it for its results."""
    _index(device)
    _C.drain()


def stats(device: _Device = None) -> dict[str, Any]:
    """What moved and what waited since the process began: :func:`memory_stats` without the memory and ``host_jobs``. Subtract
    two of them.

    Returns:
        ``fetches`` of operations and those of them that were ``hits``; ``evictions``; copies made ahead of a fetch, or for a
        step there, ``prefetches``, and those in vain, ``prefetches_wasted``; ``bytes_to_device``, ``bytes_to_host`` and the
        ``copies_to_device`` and ``copies_to_host`` that these travelled in; ``reads_in_place``, lookups of a table's rows that
        the GPU read where they are, on the host, and ``bytes_read_in_place``, which are in none of the others; ``updates`` in
        the cache, parameters that :func:`set_gpu_steps` had stepped there; ``stalls``, how often a stream of the GPU stood
        still for copies of 2 MiB or more, for 10 microseconds or more and not in a CUDA graph, and ``stall_seconds``, of
        those that have ended. Of all devices: ``host_waits``, how often threads waited for copies and for files, and
        ``host_wait_seconds``; ``host_fallbacks``, how often an operation on offload tensors alone had no CUDA kernel and ran
        on the host, by its name; ``excess_bytes``, by name the bytes between the
        elements of operands that lie apart, where 16 MiB or more were fetched and the elements were half of it or less.
    """
    everything = memory_stats(device)
    moved = {
        name.partition(".")[2]: value for name, value in everything.items() if name.startswith(("cache.", "link."))
    }
    return moved | {
        "host_waits": everything["host_waits.count"],
        "host_wait_seconds": everything["host_waits.seconds"],
        "host_fallbacks": everything["host_fallbacks"],
        "excess_bytes": everything["excess_bytes"],
    }


def get_ring_bytes() -> int:
    """GPU bytes for what is passing through; 0 without a GPU. What stays has a budget of its own, :func:`get_budget`."""
    return _C.ring_bytes()


def set_ring_bytes(count: int) -> None:
    """Sets :func:`get_ring_bytes`. A fetch may always take twice its own bytes, so that the next one overlaps with it.

    Raises:
        TypeError: for what is no integer.
        ValueError: for negative numbers, and from 2**63 on.
    """
    count = number_of_bytes("the ring", count)
    _warn_of("ring", f"{count} bytes", count)
    _C.set_ring_bytes(count)


def get_gpu_steps() -> bool:
    """What :func:`set_gpu_steps` was given last; False at first."""
    return _C.may_work_on_device()


def set_gpu_steps(enabled: bool) -> None:
    """Whether optimizers step on the GPU where all that a parameter's step needs is in the cache, or finds room there.

    Then the parameter is changed where it is and its gradient need not go home; parameter and state go home behind the step,
    so host bytes stay the newest and GPU memory a cache. Gradients and state get what weights leave of the budget
    (:func:`get_budget`); parameters for which there is no room are stepped on the host as ever. It is for PyTorch's own
    optimizers, with neither ``fused`` nor ``foreach`` given; parameters that share a storage, are in shared memory or are bytes
    of a file are stepped on the host.

    A GPU rounds some operations otherwise than a CPU, so with this results depend in their last bits on the budget.
    ``stats()["updates"]`` counts such steps, parameter by parameter. Without a GPU it does nothing, and warns.

    Raises:
        TypeError: for anything but True and False.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"optimizers step on the GPU or they don't; give True or False, not {enabled!r}.")
    if enabled:
        _warn_without_cache("set_gpu_steps(True)")
    _C.set_work_on_device(enabled)


def get_autocast_copies() -> bool:
    """What :func:`set_autocast_copies` was given last; False at first."""
    return _C.autocast_copies()


def set_autocast_copies(enabled: bool) -> None:
    """Whether the host keeps copies of fp32 weights in the dtype that ``torch.autocast`` casts them to, half as large.

    Then a weight is cast on the host, once for each value that it has, and the copy travels and stays in the cache instead of
    the weight: half the bytes on the link and on the GPU, for half as many more on the host, and a pass of the host over the
    weight behind each optimizer step. Values and gradients are the same bits. A weight gets its copy when an operation has it
    cast for the first time, if its storage has 1 MiB or more, and is neither shared between processes, nor a file's, nor made
    on the GPU; with False each copy goes when its weight is next updated or gone.

    It is for weights that are used more often than they are updated: inference, frozen weights, gradient accumulation, and
    training whose time the link sets. Compiled graphs cast on the GPU as ever, and so does all that runs with
    :func:`set_gpu_steps`. Without a GPU it does nothing, and warns.

    Raises:
        TypeError: for anything but True and False.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"copies are kept or they aren't; give True or False, not {enabled!r}.")
    if enabled:
        _warn_without_cache("set_autocast_copies(True)")
    _C.set_autocast_copies(enabled)


def get_budget(device: _Device = None) -> int:
    """GPU bytes that the cache may hold beside the ring: weights that stay, and results that the host does not have yet.

    Of an automatic budget this is what it came to when free memory was looked at last, or, before the first fetch, what it
    comes to now: this call sets the GPU up if nothing has yet, as ``torch.cuda.mem_get_info()`` does. 0 without a GPU.
    """
    return _C.budget(_index(device))


def set_budget(budget: int | str | None = "auto") -> None:
    """Sets :func:`get_budget`, for every device.

    Args:
        budget: bytes, a share of the first GPU's memory (``"40%"``), or ``"auto"`` (or None), the default: what is free, less a
            headroom, and PyTorch's allocator gets back what it asks for. ``0`` keeps nothing on the GPU beyond the ring. The
            variable ``TORCH_OFFLOAD_BUDGET`` takes the same.

    Raises:
        TypeError: for what is neither an integer, nor a string, nor None.
        ValueError: for numbers that are negative, or 2**63 or more, and for other strings.
    """
    text = "auto" if budget is None else budget
    if not isinstance(text, str):
        text = str(number_of_bytes("the budget", budget, 'a number of bytes, a share like "40%", or "auto"'))
    count = _C.budget_of(text)
    if count is not None:
        _warn_of("budget", text if text.endswith("%") else f"{count} bytes", count)
    _C.set_budget(count)


def _warn_of(what: str, said: str, count: int) -> None:
    if problem := _C.problem_of(what, said, count):
        warnings.warn(problem, stacklevel=3)


def _warn_without_cache(call: str) -> None:
    if _C.backend() == "host":
        problem = f"offload: {call} does nothing here, since the CPU computes on the host bytes and there is no cache."
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
    "get_autocast_copies",
    "get_budget",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_gpu_steps",
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
    "memory_stats_as_nested_dict",
    "memory_summary",
    "random",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_autocast_copies",
    "set_budget",
    "set_device",
    "set_gpu_steps",
    "set_ring_bytes",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stats",
    "stream",
    "synchronize",
]
