"""Forward and backward through 8 blocks of the Llama-3-8B shape in bfloat16 (3.5 GB), all weights getting gradients.

A step begins without gradients and ends when every gradient lies where its weight lives: on the GPU for the resident model, in
host memory for the others. All weights (S bytes) cross the link down once in forward, with the link to themselves at B bytes a
second, and once more in backward, while the gradients (S bytes) go up, at the rate D that each way keeps with both at once:

    ideal = max(resident, S / B + S / D)

Nothing stays on the GPU from one step to the next. B and D are measured in the same run. Activations are kept on the GPU by
all variants. Gradients are compared with the resident model's by their largest relative difference in norm, which is above
zero where PyTorch's own backward is not deterministic; exactness.py demands equality under deterministic algorithms. The exit
status is 1 where they differ by more than 1 %, or the ratio of the offload model is below its goal (not with --tiny).
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, gradients, make_blocks, make_input, parameter_bytes
from harness import (
    arguments,
    below_goals,
    compute_device,
    finish,
    gib,
    link_rates,
    measure,
    ms,
    peak_bytes,
    print_table,
    training_limit,
    write_record,
)
from peers import close_variants, make_variants

import torch_offload

COLUMNS = ["tokens", "weights", "median ms", "least-most", "ideal ms", "ratio", "off by", "peak GiB", "Slots GiB"]
# Of the ratio, by tokens.
GOALS = {4096: 0.97, 16384: 0.98}


def plain_step(model: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[], None]:
    return lambda: model(x).backward(grad_output)


def ramtorch_step(model: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.step(x, grad_outputs=grad_output)
        model.flush_grads()

    return step


def off_by(model: nn.Module, truth: nn.Module) -> float:
    """The largest |gradient - true gradient| / |true gradient| over the parameters, in Euclidean norms."""

    def one(gradient: Tensor, true: Tensor) -> Tensor:
        return (gradient.to(true.device) - true).norm() / true.norm()

    pairs = zip(gradients(model), gradients(truth), strict=True)
    return max(one(gradient.float(), true.float()).item() for gradient, true in pairs)


def memory_of(step: Callable[[], None], own: int) -> dict[str, int | None]:
    """GPU bytes that a step takes at most, those of the cache in it, and bytes that cross the link."""
    torch_offload.empty_cache()
    torch.offload.reset_peak_memory_stats()
    before = torch_offload.memory_stats()
    peak = peak_bytes(step, own)
    if peak is None:
        step()
    after = torch_offload.memory_stats()
    down, up = (after[key] - before[key] for key in ("link.bytes_to_device", "link.bytes_to_host"))
    return {"peak": peak, "slots": after["device.slot_bytes.peak"], "bytes_down": down, "bytes_up": up}


def problems(records: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that the offload model misses."""
    records = [record for record in records if record["variant"] == "offload"]
    found = [
        f"{record['tokens']} tokens: gradients differ from the resident model's by more than 1 %."
        for record in records
        if record["off_by"] > 0.01
    ]
    return found if tiny else found + below_goals(records, GOALS)


def main() -> None:
    options = arguments(__doc__, rounds=7).parse_args()
    device = compute_device(options.tiny)
    torch_offload.set_budget(0)
    shape, count = (TINY, 3) if options.tiny else (LLAMA_8B, 8)
    lengths = [16, 32] if options.tiny else [4096, 16384]
    rounds = 2 if options.tiny else options.rounds

    resident = make_blocks(count, shape, torch.bfloat16, device)
    models = make_variants(resident, device, keep_activations=True)
    total = parameter_bytes(resident)
    rates = link_rates(options.tiny)
    limit = training_limit(total, rates)
    print(f"{count} blocks, {total / 1e9:.3f} GB; {rates}", flush=True)

    rows, records = [], []
    for tokens in lengths:
        x = make_input(tokens, shape, torch.bfloat16, device)
        grad_output = make_input(tokens, shape, torch.bfloat16, device, seed=2)
        steps = {
            name: (ramtorch_step if name == "RamTorch" else plain_step)(model, x, grad_output)
            for name, model in models.items()
        }
        clear = {name: lambda model=model: model.zero_grad(set_to_none=True) for name, model in models.items()}
        times = measure(steps, rounds, prepare=clear)
        ideal = max(times["resident"].median, limit)
        errors = {name: off_by(model, resident) for name, model in models.items()}
        for name, time in times.items():
            for clear_one in clear.values():
                clear_one()
            memory = memory_of(steps[name], total if name == "resident" else 0)
            ratio = ideal / time.median
            spread = f"{ms(time.least)}-{ms(time.most)}"
            peaks = [gib(memory["peak"]), gib(memory["slots"]) if name == "offload" else "-"]
            rows.append(
                [tokens, name, ms(time.median), spread, ms(ideal), f"{ratio:.3f}", f"{errors[name]:.1e}", *peaks]
            )
            records.append(
                {"tokens": tokens, "variant": name, "seconds": vars(time), "ideal": ideal, "ratio": ratio}
                | {"off_by": errors[name], "memory": memory}
            )
    print_table(COLUMNS, rows)
    write_record("training", {"blocks": count, "bytes": total, "link": vars(rates), "runs": records})
    close_variants(models)
    finish(problems(records, options.tiny))


if __name__ == "__main__":
    main()
