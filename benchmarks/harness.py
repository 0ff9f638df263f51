"""Timing, the link's rates, tables and records: what the benchmarks share.

Variants of one piece of work take turns within one process, so that drift of clocks or of a shared link meets all alike, and
medians are compared. What is timed follows another step of its own kind, as it does in a user's loop: a GPU lowers its clocks
after dense work and raises them after waiting, and a step behind a slower variant would start with what that one has spared.
The bandwidth of the link is measured in the same run, since every bound is stated in terms of it.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_offload

Step = Callable[[], object]


def arguments(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes, and with --rounds where there is a default for it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, in seconds; on the CPU where there is no GPU"
    )
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help="timed runs of each variant (default: %(default)s)"
        )
    return parser


def compute_device(tiny: bool) -> torch.device:
    """Where the work runs: CUDA, or the CPU for a tiny run without a GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if not tiny:
        raise SystemExit("this benchmark needs a CUDA device; --tiny runs a small version of it on the CPU.")
    return torch.device("cpu")


def synchronize() -> None:
    """Waits for all kernels and for all copies to and from offload tensors."""
    torch_offload.synchronize()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def deterministic(cuda: bool) -> Iterator[None]:
    """With algorithms that give the same bits in each run; of attention's, cuDNN's backward is none. cuBLAS asks for
    CUBLAS_WORKSPACE_CONFIG in the environment before its first call."""
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if cuda else contextlib.nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def seconds(step: Step) -> float:
    """How long one call takes, from an idle device until everything that it started is done, copies home too."""
    synchronize()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        step()
        synchronize()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    step()
    torch_offload.synchronize()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant over the rounds."""

    median: float
    least: float
    most: float


def measure(
    variants: dict[str, Step], rounds: int, warmup: int = 2, prepare: dict[str, Step] | None = None
) -> dict[str, Timing]:
    """Times variants in turns, the order rotating from round to round, each step behind one of its own that is not timed.

    Args:
        variants: the steps to time, by name.
        rounds: how often each is timed.
        warmup: how often each runs before.
        prepare: by name, what is called before each timed step without being timed (clearing gradients, say).
    """
    prepare = prepare or {}
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(-warmup, rounds):
        shift = number % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            for _ in range(2):
                if name in prepare:
                    prepare[name]()
                taken = seconds(variants[name])
            if number >= 0:
                times[name].append(taken)
    return {name: Timing(statistics.median(taken), min(taken), max(taken)) for name, taken in times.items()}


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second between page-locked host memory and the GPU: down to it, up from it, and each way with both at once."""

    down: float
    up: float
    duplex: float

    def __str__(self) -> str:
        down, up, duplex = (rate / 1e9 for rate in (self.down, self.up, self.duplex))
        return f"link: {down:.1f} GB/s down, {up:.1f} up, {duplex:.1f} each way with both at once"


def training_limit(count: int, rates: LinkRates) -> float:
    """Seconds on the link of a forward and a backward over weights of so many bytes, none of which stays on the GPU: down once
    with the link to themselves, and once more while their gradients go up."""
    return count / rates.down + count / rates.duplex


def link_rates(tiny: bool = False, rounds: int = 5) -> LinkRates:
    """Measures the link with copies of 256 MiB of page-locked memory, eight in a row (1 MiB for a tiny run)."""
    size, count = (1 << 20, 2) if tiny else (256 << 20, 8)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    sources, targets = ([torch.full((size,), 7, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)] for _ in "ab")
    host_from, host_to = sources
    below, above = (target.to(device) for target in targets)
    if not cuda:

        def alone() -> None:
            for _ in range(count):
                below.copy_(host_from)

        rate = size * count / measure({"copy": alone}, rounds)["copy"].median
        return LinkRates(rate, rate, rate / 2)

    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def copies(down: bool, up: bool) -> Step:
        def step() -> None:
            here = torch.cuda.current_stream()
            for stream, wanted, to, source in zip(
                streams, (down, up), (below, host_to), (host_from, above), strict=True
            ):
                if not wanted:
                    continue
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    for _ in range(count):
                        to.copy_(source, non_blocking=True)
            for stream in streams:
                here.wait_stream(stream)

        return step

    timed = measure({"down": copies(True, False), "up": copies(False, True), "both": copies(True, True)}, rounds)
    down, up, both = (size * count / timed[name].median for name in ("down", "up", "both"))
    return LinkRates(down, up, both)


def peak_bytes(step: Step, own: int = 0) -> int | None:
    """GPU bytes that one call takes at most, `own` bytes that its model holds there for good included; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    synchronize()
    gc.collect()
    torch_offload.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize()
    return torch.cuda.max_memory_allocated() - before + own


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, on whatever devices they are; compared where the second is."""
    return torch.equal(first.detach().to(second.device), second.detach())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows under their columns, the first column to the left and the others to the right."""
    text = [list(columns)] + [[str(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in text) for i in range(len(columns))]
    for row in text:
        numbers = [value.rjust(width) for value, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *numbers]), flush=True)


def ms(value: float) -> str:
    """Seconds as milliseconds."""
    return f"{value * 1e3:.2f}"


def gib(count: int | None) -> str:
    """Bytes as GiB; a dash for None."""
    return "-" if count is None else f"{count / 2**30:.2f}"


def mib(count: int | None) -> str:
    """Bytes as MiB; a dash for None."""
    return "-" if count is None else f"{count / 2**20:.2f}"


def below_goals(records: Sequence[dict[str, Any]], goals: dict[int, float]) -> list[str]:
    """A sentence for each record, by its tokens, whose ratio to the ideal is less than the goal."""
    return [
        f"{record['tokens']} tokens: {record['ratio']:.3f} of the ideal, and not {goals[record['tokens']]}."
        for record in records
        if record["ratio"] < goals[record["tokens"]]
    ]


def finish(problems: Sequence[str]) -> None:
    """Ends the process with status 1 and a line for each problem, where there are any."""
    if problems:
        raise SystemExit("\n".join(problems))


def record_folder() -> Path:
    """Where records go, which is made: $OUT, or build/benchmarks."""
    folder = Path(os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "build" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_record(name: str, record: dict[str, Any]) -> Path:
    """Writes a benchmark's figures and what they were measured on as NAME.json to record_folder()."""
    machine = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "ring_bytes": torch_offload.get_ring_bytes(),
        "environment": {key: value for key, value in os.environ.items() if key.startswith("TORCH_OFFLOAD_")},
    }
    path = record_folder() / f"{name}.json"
    path.write_text(json.dumps({"machine": machine} | record, indent=1) + "\n")
    print(f"written: {path}", flush=True)
    return path
