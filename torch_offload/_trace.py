"""``torch_offload.trace``: what the cache did, and what it made wait, on one time line with the computation."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from torch_offload import _C
from torch_offload._names import name_all_modules, name_tensors
from torch_offload._timeline import annotate
from torch_offload.offload import device_count, memory_stats, synchronize


def _moved() -> dict[str, int]:
    """Counts of fetches, evictions and copies, of all devices."""
    every = [memory_stats(index) for index in range(device_count())]
    return {key: sum(stats[key] for stats in every) for key in every[0] if key.startswith(("cache.", "link."))}


@contextmanager
def trace(path: str | os.PathLike, model: torch.nn.Module | None = None) -> Iterator[profile]:
    """Writes what happens within it to a file that https://ui.perfetto.dev and chrome://tracing open.

    On one time line are the operations of PyTorch, kernels and copies of the GPU, and, in the category ``offload``,
    with the names of parameters: ``fetch`` (a miss: the copy to the GPU is enqueued), ``prefetch`` (the same ahead of a
    fetch that is expected), ``hit``, ``write_back`` and ``store`` (copies home are enqueued), ``evict``, ``wait`` (the
    host waits for copies, or for ``host_work``), ``host_work`` (an optimizer's step of a parameter, say, which a thread does
    while the program goes on) and ``stall`` (a stream of the GPU waits for a copy). Each has the arguments ``activity``
    and ``tensor``, and all but stalls have ``bytes``. Copies on the GPU carry the names too; those that were enqueued at
    once all carry the last one's. The file also has the counts of :func:`memory_stats` of that time, under
    ``torch_offload``. Where the host computes, and no GPU is simulated, nothing is copied, and the file has the
    operations alone.

    It is a run of ``torch.profiler`` and costs as much, so only one can go on at a time. The ranges, without stalls and
    without what a thread does while the program goes on, are in every other run of ``torch.profiler`` as well. The file is
    also written when an exception leaves the block.

    Args:
        path: the file to write, JSON.
        model: whose names the parameters get. Without it all modules are searched, which takes seconds in a large process.

    Yields:
        The ``torch.profiler.profile`` object.
    """
    path = Path(path).absolute()  # wherever the program goes meanwhile
    path.touch()  # what can't be written is known before anything runs
    name_all_modules() if model is None else name_tensors(model)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    synchronize()  # what was asked for before is neither seen nor counted
    profiler = profile(activities=activities, acc_events=True)
    profiler.start()
    _C.look_at_host_work(True)
    before = _moved()
    try:
        yield profiler
    finally:
        try:
            synchronize()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        finally:
            counts = {key: count - before[key] for key, count in _moved().items()}
            _C.look_at_host_work(False)  # of which nothing may go on while the profiler stops
            profiler.stop()
            _write(profiler, path, counts)


def _write(profiler: profile, path: Path, counts: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        timeline = json.loads(raw.read_text())
    annotate(timeline)
    timeline["torch_offload"] = counts
    path.write_text(json.dumps(timeline))
