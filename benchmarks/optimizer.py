"""AdamW on the host: a step over 470 million fp32 parameters, and training steps in which the GPU works meanwhile.

First the optimizer alone: the same parameters on offload and as plain CPU tensors, by PyTorch's default algorithm (its
for-loop) and by its fused one, in turns (38 GB of host memory). Then 8 blocks of the Llama-3-8B shape with their
weights on offload, 4,096 tokens, in bfloat16 and in fp32 under autocast: forward, backward and AdamW's step, four times
on end, once as a user writes it, and once with waits around the step, which then finds every gradient at home and is
done when it returns. Results have the bits of the same algorithm on the CPU, as test_optimizer_steps.py and
test_host_updates.py demand; but for steps "on the GPU", by set_gpu_steps(True), where all that they need is in the
cache. The exit status is 1 where a goal is missed (not with --tiny).
"""

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, copied_to, make_blocks, make_input, parameter_bytes
from harness import (
    arguments,
    compute_device,
    finish,
    gib,
    measure,
    ms,
    print_table,
    seconds,
    synchronize,
    write_record,
)

import torch_offload

ON_END = 4  # training steps, as the host works on one while the GPU works on the next
ALGORITHMS = {"default": {}, "fused": {"fused": True}}
ON_GPU = "on the GPU"
ALONE = 1.1  # times PyTorch's fused step of plain CPU tensors: the default one of offload parameters, at most
# Of the training step with waits: the one as it is, at most, by the weights' dtype.
GOALS = {"torch.bfloat16": 0.82, "torch.float32": 0.78}


def alone(tiny: bool, rounds: int) -> list[dict]:
    count, size = (3, 70_000) if tiny else (16, 29_375_000)
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    for place in ("cpu", "offload"):
        for algorithm, options in (ALGORITHMS | ({ON_GPU: {}} if place == "offload" else {})).items():
            leaves = [nn.Parameter(torch.ones(size).to(place)) for _ in range(count)]
            for leaf in leaves:
                leaf.grad = torch.full_like(leaf, 0.5)
            steps[place, algorithm] = torch.optim.AdamW(leaves, **options).step

    def step(place: str, algorithm: str) -> None:
        torch_offload.set_gpu_steps(algorithm == ON_GPU)
        steps[place, algorithm]()

    variants = {" ".join(names): functools.partial(step, *names) for names in steps}
    times = measure(variants, rounds)
    rows, records = [], []
    for (place, algorithm), (name, time) in zip(steps, times.items(), strict=True):
        torch.offload.reset_peak_memory_stats()
        before = torch_offload.memory_stats().get("host.allocated_bytes.current", 0)
        variants[name]()
        torch_offload.synchronize()
        more = torch_offload.memory_stats().get("host.allocated_bytes.peak", 0) - before
        ratio = f"{time.median / times['cpu fused'].median:.3f}"
        more_gib = gib(more) if place == "offload" else "-"
        rows.append([place, algorithm, ms(time.median), ms(time.least), ratio, more_gib])
        records.append({"place": place, "algorithm": algorithm, "median": time.median, "more_bytes": more})
    torch_offload.set_gpu_steps(False)
    print(f"AdamW, {count * size:,} fp32 parameters, {torch.get_num_threads()} threads")
    print_table(["parameters", "algorithm", "median ms", "least ms", "of fused on CPU", "more GiB"], rows)
    return records


def training(tiny: bool, rounds: int, dtype: torch.dtype) -> list[dict]:
    device = compute_device(tiny)
    shape, count, tokens = (TINY, 3, 16) if tiny else (LLAMA_8B, 8, 4096)
    model = copied_to(make_blocks(count, shape, dtype, device), "offload")
    x = make_input(tokens, shape, dtype, device)
    grad_output = make_input(tokens, shape, dtype, device, seed=2)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.float32)
    rows, records = [], []

    def compute(model: nn.Module, x: Tensor, grad_output: Tensor) -> None:
        with autocast:
            y = model(x)
        y.backward(grad_output.to(y.dtype))

    for algorithm, options in (ALGORITHMS | {ON_GPU: {}}).items():
        torch_offload.set_gpu_steps(algorithm == ON_GPU)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **options)

        def step(wait: bool, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            compute(model, x, grad_output)
            if wait:
                synchronize()
            optimizer.step()
            if wait:
                torch_offload.synchronize()

        def timed(one: Callable[[], None]) -> float:
            return seconds(lambda: [one() for _ in range(ON_END)]) / ON_END

        def without(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            compute(model, x, grad_output)

        for _ in range(2):
            step(wait=False)
        times: dict[str, list[float]] = {"as it is": [], "with waits": [], "without a step": []}
        for _ in range(rounds):
            times["as it is"].append(timed(functools.partial(step, wait=False)))
            times["with waits"].append(timed(functools.partial(step, wait=True)))
            times["without a step"].append(timed(without))
        waited = median(times["with waits"])
        for name, taken in times.items():
            rows.append([algorithm, name, ms(median(taken)), ms(min(taken)), f"{median(taken) / waited:.3f}"])
            records.append({"dtype": str(dtype), "algorithm": algorithm, "variant": name, "median": median(taken)})
        del optimizer
        gc.collect()
    torch_offload.set_gpu_steps(False)
    print(f"\n{count} blocks of {dtype}, {parameter_bytes(model) / 1e9:.3f} GB, {tokens} tokens")
    print_table(["algorithm", "training step", "median ms", "least ms", "of one with waits"], rows)
    return records


def problems(steps: list[dict[str, Any]], runs: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that is missed. Steps on the GPU have none: what these goals are about is the host's work."""
    if tiny:
        return []
    found = []
    times = {(step["place"], step["algorithm"]): step["median"] for step in steps}
    ratio = times["offload", "default"] / times["cpu", "fused"]
    if ratio > ALONE:
        found.append(f"AdamW on offload: {ratio:.3f} times PyTorch's fused step on the CPU, and not {ALONE}.")
    medians = {(run["dtype"], run["algorithm"], run["variant"]): run["median"] for run in runs}
    for dtype, goal in GOALS.items():
        for algorithm in ALGORITHMS:
            part = medians[dtype, algorithm, "as it is"] / medians[dtype, algorithm, "with waits"]
            if part > goal:
                found.append(f"training in {dtype}, {algorithm}: {part:.3f} of the step with waits, and not {goal}.")
    return found


def main() -> None:
    options = arguments(__doc__, rounds=3).parse_args()
    rounds = 2 if options.tiny else options.rounds
    records = {"alone": alone(options.tiny, rounds), "training": []}
    for dtype in (torch.bfloat16, torch.float32):
        records["training"] += training(options.tiny, rounds, dtype)
        gc.collect()
    write_record("optimizer", records)
    finish(problems(records["alone"], records["training"], options.tiny))


if __name__ == "__main__":
    main()
