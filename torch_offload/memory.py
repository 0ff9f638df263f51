"""``torch.offload.memory``: how much memory offload tensors hold, and where; named as in ``torch.cuda.memory``.

Counts of bytes are of host memory, unless a name says device (the cache on the GPU).

Snapshots are for PyTorch's visualizer. Segments are the regions that host memory comes from, and blocks the ranges of storages
in them; all devices ``offload:i`` share them. Where ``torch.cuda`` tells the Python stack that allocated a block, there is one
frame with its purpose, as in :func:`memory_stats`. Memory that others own (results on a machine where the host computes) is in
no segment.

>>> torch.offload.memory._record_memory_history(max_entries=100_000)
>>> torch.nn.Linear(4, 4).to("offload")
Linear(in_features=4, out_features=4, bias=True)
>>> torch.offload.memory._dump_snapshot("snapshot.pickle")  # drop it on https://docs.pytorch.org/memory_viz
>>> torch.offload.memory._record_memory_history(enabled=None)
"""

import functools
import os
import pickle
from pathlib import Path
from typing import Any

from torch_offload import _C, _summary
from torch_offload._index import Device, index_of


def empty_cache() -> None:
    """Gives up what nothing uses: the GPU memory of cached copies, and host memory.

    On the GPU that is all but the copies that fetched tensors hold at the moment, what has been copied ahead included. Results
    that the host does not have yet go home first. PyTorch's own unused GPU memory goes back to the driver with it, as at
    ``torch.cuda.empty_cache()``. On the host it is memory that no tensor uses, and the rings that pageable memory is copied
    through. Whatever is needed again is made again; no result depends on it.
    """
    _C.empty_cache()


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Counters since the process began; peaks since :func:`reset_peak_memory_stats`, and sums of what has come and gone since
    :func:`reset_accumulated_memory_stats`.

    Returns:
        A value that goes up and down has ``.current``; those of ``host.allocated``, ``host.file``, the purposes,
        ``host.reserved_bytes`` and ``device.slot_bytes`` have ``.peak``, too, and the sums of all that has come,
        ``.allocated``, and gone, ``.freed``. ``host.*``: bytes of host memory that tensors hold (``allocated``), that are held
        from the system (``reserved``), that this process has mapped beside them and may have in common with others
        (``shared``), that are page-locked (``pinned``), that copies of pageable memory and of files go through (``ring``,
        page-locked, too, and in none of the others), and bytes of tensors that are read from their files (``file``). Those take
        no memory, and are in none of the others; the first write to a storage brings all of it into memory, and moves it
        from ``file`` to ``allocated``.
        ``host.*_bytes`` and ``host.*_count`` are bytes and numbers of storages by purpose, and add up to
        ``host.allocated_bytes`` and ``host.allocated_count``: ``parameter`` (what a module holds, or a leaf that requires
        gradients), ``gradient``, ``optimizer`` (its state, from the end of the step that made it on), ``activation``
        (results of operations) and ``temporary`` (everything else). A storage counts in ``.allocated`` as what it turned out to
        be, so these add up, too. ``device.*``: bytes of the cache on the GPU.
        ``cache.*``: fetches, hits and evictions, lookups of a table's rows that the GPU read where they are, on the host
        (``reads_in_place``), copies made ahead of a fetch, or for a step there (``prefetches``), and those of them that nobody
        asked for (``prefetches_wasted``), and parameters that were stepped there (``updates``). ``link.*``: bytes and copies in
        each direction; ``bytes_read_in_place`` are in none of the others; how often streams of the GPU stood still for copies
        (``stalls``) and for how long (``stall_seconds``). ``host_jobs.*``: steps of optimizers, by parameters,
        and other large updates that were to be done on the host while the program goes on (``submitted``), and those not done
        yet (``pending``), which hold the memory of their tensors. ``host_waits.*``: how often threads waited for copies, files
        and such work, and for how many seconds. ``host_fallbacks``: how often an operation on offload tensors alone had no CUDA
        kernel and ran on the host, by its name. ``excess_bytes``: by name the bytes between the elements of operands that lie
        apart, where an operation had 16 MiB or more fetched and the elements were half of it or less, whether or not the cache
        had it.
    """
    return _C.statistics(index_of(device))


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """:func:`memory_stats` by the parts of its names: ``["host"]["allocated_bytes"]["current"]``."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats(device).items():
        *parents, leaf = name.split(".")
        functools.reduce(lambda within, part: within.setdefault(part, {}), parents, nested)[leaf] = value
    return nested


def reset_peak_memory_stats(device: Device = None) -> None:
    """Makes every peak the current value."""
    _C.reset_peaks(index_of(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Begins every ``.allocated`` and ``.freed`` anew: what there is now is all that has come, and nothing has gone."""
    _C.reset_ever(index_of(device))


def memory_allocated(device: Device = None) -> int:
    """Bytes of host memory that offload tensors hold."""
    return memory_stats(device)["host.allocated_bytes.current"]


def max_memory_allocated(device: Device = None) -> int:
    """The peak of :func:`memory_allocated`."""
    return memory_stats(device)["host.allocated_bytes.peak"]


def memory_reserved(device: Device = None) -> int:
    """Bytes of host memory held from the system, in use and cached."""
    return memory_stats(device)["host.reserved_bytes.current"]


def max_memory_reserved(device: Device = None) -> int:
    """The peak of :func:`memory_reserved`."""
    return memory_stats(device)["host.reserved_bytes.peak"]


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Host memory that offload tensors may still take, and all that there is, in bytes; all devices share it.

    Both are what the machine says, or the container where that has less. As with ``torch.cuda``, what is cached (reserved and
    not allocated) is not free: :func:`empty_cache` gives it back. Memory of pageable tensors counts as free until somebody
    writes to it. ``torch.cuda.mem_get_info`` tells the GPU's.

    Returns:
        The free bytes, and the total.
    """
    index_of(device)
    return _C.host_memory()


def memory_snapshot() -> list[dict[str, Any]]:
    """The segments of host memory and their blocks: those of :func:`_snapshot`."""
    return _snapshot()["segments"]


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """:func:`memory_stats` as a table for people, like that of ``torch.cuda``; ``abbreviated`` leaves the parts of sums out."""
    index = index_of(device)
    return _summary.table(memory_stats(device), index, _C.budget(index), _C.ring_bytes(), abbreviated)


def _record_memory_history(enabled: str | None = "all", max_entries: int = 1 << 20) -> None:
    """Keeps the last ``max_entries`` allocations and frees for :func:`_snapshot`; 32 bytes of memory each.

    Args:
        enabled: ``"all"`` starts anew; None ends it, and keeps what has been recorded until the next start.
        max_entries: how many, at least 1.

    Raises:
        ValueError: for anything else.
    """
    if enabled not in ("all", None):
        raise ValueError(f'enabled is "all" or None; got {enabled!r}. A snapshot tells the state without a history.')
    if max_entries < 1:
        raise ValueError(f"a history has at least 1 entry; got max_entries={max_entries}. Give enabled=None to end it.")
    _C.record_history(max_entries if enabled else 0)


def _snapshot() -> dict[str, Any]:
    """The state of host memory now, and the history if one was recorded.

    Returns:
        ``segments`` and ``device_traces`` as ``torch.cuda.memory._snapshot()`` describes them, for the functions of
        ``torch.cuda._memory_viz``. A block is ``active_allocated``, ``active_pending_free`` (its tensor is gone, and a copy
        still uses it) or ``inactive``. A segment also says whether it ``is_pinned``. In the history a block is free as soon as
        its tensor is gone.
    """
    return _C.snapshot()


def _dump_snapshot(filename: str | os.PathLike = "dump_snapshot.pickle") -> None:
    """Writes :func:`_snapshot` to a file that https://docs.pytorch.org/memory_viz opens."""
    Path(filename).write_bytes(pickle.dumps(_snapshot()))


__all__ = [
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
]
