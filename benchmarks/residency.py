"""What GPU memory buys: forward and training by the budget of the cache, on blocks of the Llama-3-8B shape in bfloat16.

Forward through 12 blocks (5.2 GB) with nothing kept, with a budget of half the weights, with the automatic budget on an empty
GPU, and with the automatic budget when another tensor then takes what the cache has, but for the headroom and half the
weights. Then training steps of four micro-batches through 8 blocks: gradients add up on the GPU, and cross the link once a
step. Times are medians of steps after the first ones; with the automatic budget on an empty GPU, of a new model's from its
second on. A budget is one for all of the process, so budgets are measured one after the other, the resident model first; with
the automatic one, which is held against it, the resident model takes turns. The exit status is 1 where bits differ or a goal
is missed; --tiny compares bits alone.
"""

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, copied_to, gradients, make_blocks, make_input, parameter_bytes
from harness import (
    LinkRates,
    arguments,
    compute_device,
    equal,
    finish,
    gib,
    link_rates,
    measure,
    ms,
    print_table,
    write_record,
)

import torch_offload

HEADROOM = 4 << 30  # what an automatic budget leaves on a large GPU
MICRO_BATCHES = 4
HALF_BUDGET = 0.55  # of the time without a budget, at most
NEAR = 1.02  # times the ideal, at most
# The same with one token, where the host's calls take the time, and a weight in the cache costs the host its fetch.
NEAR_WITH_ONE_TOKEN = 1.3
FILLED = 1.05  # times the ideal on a GPU that others have filled, at most
ONCE = 1.01  # bytes home of all gradients', at most


def filled_but_for(free: int) -> Tensor | None:
    """A tensor that takes all of the GPU but `free` bytes, those of the cache too; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.empty_cache()
    cached = torch_offload.memory_stats()["device.slot_bytes.current"]
    return torch.empty(torch.cuda.mem_get_info()[0] + cached - free, dtype=torch.uint8, device="cuda")


def moved(step: Callable[[], object]) -> tuple[int, int]:
    """Bytes that one step moves to the device and home."""
    before = torch_offload.memory_stats()
    step()
    torch_offload.synchronize()
    after = torch_offload.memory_stats()
    return tuple(after[key] - before[key] for key in ("link.bytes_to_device", "link.bytes_to_host"))


def forward(tiny: bool, rounds: int, device: torch.device, rates: LinkRates) -> list[dict]:
    shape, count = (TINY, 3) if tiny else (LLAMA_8B, 12)
    resident = make_blocks(count, shape, torch.bfloat16, device)
    model = copied_to(resident, "offload")
    total = parameter_bytes(resident)
    rows, records = [], []
    with torch.no_grad():
        for tokens in [1, 32] if tiny else [1, 2048]:
            x = make_input(tokens, shape, torch.bfloat16, device)
            truth = resident(x)
            resident_first = measure({"resident": lambda x=x: resident(x)}, rounds)["resident"].median
            nothing = None
            for name, budget in (("0", 0), ("half", total // 2), ("auto", "auto"), ("auto, full GPU", "auto")):
                if name == "auto":
                    model = copied_to(resident, "offload")
                    torch_offload.empty_cache()
                others = filled_but_for(HEADROOM + total // 2 + (1 << 30)) if name == "auto, full GPU" else None
                torch_offload.set_budget(budget)
                step = functools.partial(model, x)
                beside = {"resident": lambda x=x: resident(x)} if name == "auto" else {}
                times = measure({name: step} | beside, rounds, warmup=0 if beside else 4)
                time = times[name]
                base = times["resident"].median if beside else resident_first
                down, _ = moved(step)
                # For the bytes that it moves; where the GPU is filled, for those that have no room.
                ideal = max(base, (down if others is None else total - total // 2) / rates.down)
                same = equal(model(x), truth)
                nothing = nothing or time.median
                staying = torch_offload.memory_stats()["device.staying_bytes.current"]
                rows.append(
                    [
                        *(tokens, name, ms(time.median), f"{ms(time.least)}-{ms(time.most)}"),
                        *(f"{time.median / one:.3f}" for one in (nothing, base, ideal)),
                        *(gib(staying), gib(down), "yes" if same else "NO"),
                    ]
                )
                records.append(
                    {"tokens": tokens, "budget": name, "seconds": vars(time), "resident": base, "equal": same}
                    | {"ideal": ideal, "bytes_down": down, "staying": staying}
                )
                del others
                gc.collect()
                torch.cuda.empty_cache()
    print(f"forward, {count} blocks, {total / 1e9:.3f} GB; {rates}")
    columns = ["tokens", "budget", "median ms", "least-most", "of budget 0", "of resident", "of ideal", "stays GiB"]
    print_table([*columns, "down GiB", "same bits"], rows)
    return records


def training(tiny: bool, rounds: int, device: torch.device, rates: LinkRates) -> list[dict]:
    shape, count, tokens = (TINY, 3, 16) if tiny else (LLAMA_8B, 8, 4096)
    resident = make_blocks(count, shape, torch.bfloat16, device)
    model = copied_to(resident, "offload")
    total = parameter_bytes(resident)
    inputs = [make_input(tokens, shape, torch.bfloat16, device, seed=k) for k in range(MICRO_BATCHES)]
    grad_output = make_input(tokens, shape, torch.bfloat16, device, seed=99)
    torch_offload.set_budget("auto")

    def step(model: nn.Module) -> None:
        for x in inputs:
            model(x).backward(grad_output)

    def start(model: nn.Module) -> None:
        # As an optimizer does: the host reads every gradient, and the next step begins without.
        if model is not resident and next(model.parameters()).grad is not None:
            with torch_offload.on_host():
                torch._foreach_norm(list(gradients(model)))
        model.zero_grad(set_to_none=True)

    models = {"resident": resident, "offload": model}
    times = measure(
        {name: functools.partial(step, one) for name, one in models.items()},
        rounds,
        warmup=3,
        prepare={name: functools.partial(start, one) for name, one in models.items()},
    )
    start(model)
    down, up = moved(functools.partial(step, model))
    ideal = times["resident"].median + total / rates.up
    rows = [
        [name, ms(time.median), f"{ms(time.least)}-{ms(time.most)}", f"{ideal / time.median:.3f}"]
        for name, time in times.items()
    ]
    print(f"\n{MICRO_BATCHES} micro-batches of {tokens} tokens, {count} blocks, {total / 1e9:.3f} GB")
    print(f"ideal: resident and one trip home, {ms(ideal)} ms; moved a step: {gib(down)} GiB down, {gib(up)} GiB up")
    print_table(["weights", "median ms", "least-most", "ratio"], rows)
    record = {"micro_batches": MICRO_BATCHES, "tokens": tokens, "ideal": ideal, "bytes": total}
    record |= {"bytes_down": down, "bytes_up": up}
    return [record | {"variant": name, "seconds": vars(time)} for name, time in times.items()]


def problems(runs: list[dict[str, Any]], steps: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that is missed."""
    found = [
        f"{run['tokens']} tokens, budget {run['budget']}: the output differs from the resident model's."
        for run in runs
        if not run["equal"]
    ]
    if tiny:
        return found
    medians = {(run["tokens"], run["budget"]): run["seconds"]["median"] for run in runs}
    for run in runs:
        tokens, budget, median = run["tokens"], run["budget"], run["seconds"]["median"]
        part = median / medians[tokens, "0"]
        near = NEAR_WITH_ONE_TOKEN if tokens == 1 else NEAR
        if budget == "half" and part > HALF_BUDGET:
            found.append(f"{tokens} tokens, half the weights: {part:.3f} of the time without, and not {HALF_BUDGET}.")
        if budget == "auto" and median > near * run["resident"]:
            found.append(
                f"{tokens} tokens, automatic: {median / run['resident']:.3f} times the resident, and not {near}."
            )
        if budget == "auto, full GPU" and median > FILLED * run["ideal"]:
            found.append(f"{tokens} tokens, GPU filled: {median / run['ideal']:.3f} times the ideal, and not {FILLED}.")
    for step in steps:
        if step["variant"] == "offload" and step["seconds"]["median"] > NEAR * step["ideal"]:
            found.append(
                f"micro-batches: {step['seconds']['median'] / step['ideal']:.3f} times the ideal, and not {NEAR}."
            )
        if step["bytes_up"] > ONCE * step["bytes"] or step["bytes_down"] > (ONCE - 1) * step["bytes"]:
            down, up = (gib(step[key]) for key in ("bytes_down", "bytes_up"))
            found.append(
                f"micro-batches: {down} GiB down and {up} up, where gradients of {gib(step['bytes'])} go home once."
            )
    return found


def main() -> None:
    options = arguments(__doc__, rounds=9).parse_args()
    device = compute_device(options.tiny)
    rounds = 2 if options.tiny else options.rounds
    rates = link_rates(options.tiny)
    runs = forward(options.tiny, rounds, device, rates)
    gc.collect()
    torch_offload.empty_cache()
    steps = training(options.tiny, rounds, device, rates)
    write_record("residency", {"link": vars(rates), "runs": runs + steps})
    finish(problems(runs, steps, options.tiny))


if __name__ == "__main__":
    main()
