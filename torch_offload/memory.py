"""``torch.offload.memory``: snapshots of host memory for PyTorch's visualizer, named as those of ``torch.cuda.memory`` are.

Segments are the regions that host memory comes from, and blocks the ranges of storages in them; all devices ``offload:i`` share
them. Where ``torch.cuda`` tells the Python stack that allocated a block, there is one frame with its purpose, as in
:func:`torch.offload.memory_stats`. Memory that others own (results on a machine where the host computes) is in no segment.

>>> torch.offload.memory._record_memory_history(max_entries=100_000)
>>> torch.nn.Linear(4, 4).to("offload")
Linear(in_features=4, out_features=4, bias=True)
>>> torch.offload.memory._dump_snapshot("snapshot.pickle")  # drop it on https://docs.pytorch.org/memory_viz
>>> torch.offload.memory._record_memory_history(enabled=None)
"""

import os
import pickle
from pathlib import Path
from typing import Any

from torch_offload import _C


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
