"""How fast page-locked memory is had from the system, and how much of it a model's sizes take.

A fresh process allocates tensors with `torch.empty(..., device="offload")` and touches every page, another does the same with
`pin_memory=True`, which is cudaHostAlloc's rate; they take turns, and medians are compared. The goal is six times that rate, on
a machine with 16 cores. Then come lists of real sizes: bytes that are page-locked over bytes that were asked for, which must
not exceed 1.03. The exit status is 1 where a goal is missed; --tiny compares no rates.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from harness import arguments, compute_device, finish, gib, print_table, write_record

import torch_offload

PAGE = 4096
GOAL = 6
MOST_PINNED = 1.03


def llama(blocks: int, hidden: int, feed_forward: int, tokens: int) -> list[int]:
    """Bytes of the weights of a Llama in bfloat16, with a quarter as many key and value heads as query heads."""
    block = [hidden * hidden] * 2 + [hidden * hidden // 4] * 2 + [feed_forward * hidden] * 3 + [hidden] * 2
    return [2 * count for count in [tokens * hidden, *(block * blocks), hidden, tokens * hidden]]


def resnet50() -> list[int]:
    """Bytes of the weights and buffers of torchvision's ResNet-50 in float32."""
    sizes: list[int] = []

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        sizes.extend([4 * inputs * outputs * kernel**2, *[4 * outputs] * 4, 8])

    convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*sizes, 4 * 1000 * 2048, 4 * 1000]


def timed_lists(tiny: bool) -> dict[str, list[int]]:
    """Sizes of a total that a power of two divides, to which PyTorch's allocator rounds."""
    if tiny:
        return {"64 MiB in one": [64 << 20], "16 x 4 MiB": [4 << 20] * 16}
    return {"8 GiB in one": [8 << 30], "64 x 128 MiB": [128 << 20] * 64}


def model_lists(tiny: bool) -> dict[str, list[int]]:
    lists = {"ResNet-50, float32": resnet50()}
    if not tiny:
        lists["64 x 129.5 MB"] = [129_500_000] * 64
        lists["Llama-3-8B, bfloat16"] = llama(32, 4096, 14336, 128256)
    return lists


def allocate(kind: str, size: int) -> Tensor:
    if kind == "offload":
        return torch.empty(size, dtype=torch.uint8, device="offload")
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def measure_here(kind: str, sizes: list[int]) -> dict[str, float]:
    """Allocates the sizes in this process, which has done nothing of the kind yet."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda")
    allocate(kind, 1)
    begin = time.perf_counter()
    tensors = [allocate(kind, size) for size in sizes]
    allocated = time.perf_counter()
    for tensor in tensors:
        tensor[::PAGE] = 1
    end = time.perf_counter()
    stats = torch_offload.memory_stats()
    held = stats["host.pinned_bytes.current" if torch.cuda.is_available() else "host.reserved_bytes.current"]
    return {"seconds": end - begin, "allocation_seconds": allocated - begin, "held": held}


def measure(kind: str, name: str, tiny: bool) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--measure", kind, name] + (["--tiny"] if tiny else [])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{kind}, {name}: {done.stderr}")
    if "page-locked" in done.stderr:
        print(done.stderr.strip(), flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare_rates(tiny: bool, rounds: int) -> list[dict[str, Any]]:
    rows, records = [], []
    for name, sizes in timed_lists(tiny).items():
        runs: dict[str, list[dict[str, float]]] = {"offload": [], "pin_memory": []}
        for _ in range(rounds):
            for kind, taken in runs.items():
                taken.append(measure(kind, name, tiny))
        rates = {kind: sum(sizes) / median(run["seconds"] for run in taken) / 2**30 for kind, taken in runs.items()}
        ratio = rates["offload"] / rates["pin_memory"]
        answer = "-" if tiny else "yes" if ratio >= GOAL else "NO"
        rows.append([name, *(f"{rate:.2f}" for rate in rates.values()), f"{ratio:.2f}", answer])
        records.append({"sizes": name, "bytes": sum(sizes), "ratio": ratio, "gib_per_second": rates, "processes": runs})
    print_table(["GiB/s, first touch included", "offload", "pin_memory", "ratio", f">= {GOAL}"], rows)
    return records


def compare_bytes(tiny: bool) -> list[dict[str, Any]]:
    rows, records = [], []
    for name, sizes in model_lists(tiny).items():
        held = measure("offload", name, tiny)["held"]
        ratio = held / sum(sizes)
        rows.append([name, len(sizes), gib(sum(sizes)), f"{ratio:.4f}", "yes" if ratio <= MOST_PINNED else "NO"])
        records.append({"sizes": name, "asked": sum(sizes), "held": held, "ratio": ratio})
    print_table(["sizes", "tensors", "GiB", "pinned / asked", f"<= {MOST_PINNED}"], rows)
    return records


def problems(rates: list[dict[str, Any]], sizes: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that is missed."""
    missed = []
    if not tiny and any(record["ratio"] < GOAL for record in rates):
        missed.append(f"page-locked memory comes at less than {GOAL} times the rate of cudaHostAlloc.")
    if any(record["ratio"] > MOST_PINNED for record in sizes):
        missed.append(f"more than {MOST_PINNED} times the bytes that were asked for are page-locked.")
    return missed


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "SIZES"), help="one measurement, in this process")
    options = parser.parse_args()
    if options.measure:
        kind, name = options.measure
        lists = timed_lists(options.tiny) | model_lists(options.tiny)
        print(json.dumps(measure_here(kind, lists[name])))
        return
    if compute_device(options.tiny).type != "cuda":
        print("without a GPU nothing is page-locked: these are rates of pageable memory, and bytes of regions")
    rates = compare_rates(options.tiny, 1 if options.tiny else options.rounds)
    sizes = compare_bytes(options.tiny)
    write_record("arena", {"rates": rates, "sizes": sizes})
    finish(problems(rates, sizes, options.tiny))


if __name__ == "__main__":
    main()
