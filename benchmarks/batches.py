"""What copies in batches bring: weights of 64 KiB to 4 MiB, 1 GiB of each, streamed in an order that repeats.

Each is added to a tensor on the GPU, where nothing stays (a budget of 0). Once with TORCH_OFFLOAD_PREFETCH=0: each weight is
copied by a call of its own, when the operation asks. Once with 1: the cache expects the order, and enqueues several weights of
up to 2 MiB at once. The setting is one for all of a process, so each has a process of its own, which measures the link too; the
ratio is the rate at which bytes were moved over the link's. The smaller the weights, the more of the time is the host's, for
the operations. The exit status is 1 where a sum is wrong, where weights of 1 MiB come at less than 0.95 of the link's rate with
prefetching, or where they come slower than without.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from harness import arguments, compute_device, equal, finish, link_rates, measure, ms, print_table, write_record

import torch_offload

KIB = 1 << 10
GOAL = 0.95  # of the link's rate, with weights of 1 MiB


def add_all(weights: list[Tensor], total: Tensor) -> Tensor:
    total.zero_()
    for weight in weights:
        total.add_(weight)
    return total


def stream(size: int, every: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Times additions of `every` bytes of weights of `size` bytes each; their sum is checked."""
    count = every // size
    # Small whole numbers: every order gives the same sum.
    values = torch.arange(size // 4, dtype=torch.float32) % 7
    weights = [(values + k % 5).to("offload") for k in range(count)]
    truth = values * count + sum(k % 5 for k in range(count))
    total = torch.empty(size // 4, device=device)
    step = functools.partial(add_all, weights, total)
    same = equal(step(), truth)
    time = measure({"step": step}, rounds, warmup=3)["step"]
    before = torch_offload.memory_stats()
    same = equal(step(), truth) and same
    after = torch_offload.memory_stats()
    moved, copies, ahead = (
        after[key] - before[key] for key in ("link.bytes_to_device", "link.copies_to_device", "cache.prefetches")
    )
    return {"size": size, "weights": count, "seconds": vars(time), "equal": same, "moved": moved} | {
        "copies": copies,
        "ahead": ahead,
        "rate": moved / time.median,
    }


def measure_here(tiny: bool, rounds: int) -> dict[str, Any]:
    device = compute_device(tiny)
    torch_offload.set_budget(0)
    if tiny:
        torch_offload.set_ring_bytes(256 * KIB)
    every = 512 * KIB if tiny else 1 << 30
    sizes = [4 * KIB, 64 * KIB] if tiny else [64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB]
    rates = link_rates(tiny)
    with torch.no_grad():
        runs = [stream(size, every, rounds, device) for size in sizes]
    return {"link": vars(rates), "runs": runs}


def measure_apart(prefetch: bool, tiny: bool, rounds: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--here", f"--rounds={rounds}", *(["--tiny"] if tiny else [])]
    environment = os.environ | {"TORCH_OFFLOAD_PREFETCH": str(int(prefetch))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the run with TORCH_OFFLOAD_PREFETCH={int(prefetch)} failed.\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def problems(runs: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that is missed."""
    found = [f"the sum of weights of {run['size'] // KIB} KiB is wrong." for run in runs if not run["equal"]]
    one, ahead = ([run for run in runs if run["size"] == 1024 * KIB and run["prefetch"] is on] for on in (False, True))
    for alone, run in zip(one, ahead, strict=True):
        if not tiny and run["ratio"] < max(GOAL, alone["ratio"]):
            found.append(
                f"weights of 1 MiB: {run['ratio']:.3f} of the link's rate, and not {GOAL}, or {alone['ratio']:.3f} as without."
            )
    return found


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument(
        "--here", action="store_true", help="measures in this process, with its setting, and prints a record"
    )
    options = parser.parse_args()
    rounds = 2 if options.tiny else options.rounds
    if options.here:
        print(json.dumps(measure_here(options.tiny, rounds)), flush=True)
        return
    compute_device(options.tiny)
    rows, records = [], []
    for prefetch in (False, True):
        found = measure_apart(prefetch, options.tiny, rounds)
        down = found["link"]["down"]
        for run in found["runs"]:
            time = run["seconds"]
            rows.append(
                [
                    *(run["size"] // KIB, "1" if prefetch else "0", ms(time["median"])),
                    f"{ms(time['least'])}-{ms(time['most'])}",
                    *(f"{run['rate'] / 1e9:.2f}", f"{down / 1e9:.2f}", f"{run['rate'] / down:.3f}"),
                    *(run["copies"], run["ahead"], "yes" if run["equal"] else "NO"),
                ]
            )
            records.append(run | {"prefetch": prefetch, "link": found["link"], "ratio": run["rate"] / down})
    columns = ["KiB", "PREFETCH", "median ms", "least-most", "GB/s", "link GB/s", "ratio", "copies", "ahead", "right"]
    print_table(columns, rows)
    write_record("batches", {"runs": records})
    finish(problems(records, options.tiny))


if __name__ == "__main__":
    main()
