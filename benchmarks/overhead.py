"""What an operation costs the host: microseconds a call with a small weight on offload against the same weight on CUDA.

Calls follow each other without a wait, on weights so small that the GPU keeps up, and whose copies the cache holds; what is
timed is the work of the CPU. The first row is the part of it that one weight costs, whatever the operation does: a fetch that
finds its copy, the tensor over it, and giving both back, beside an alias of the plain weight. What an operation costs beyond
that, for each of its weights, is the way there: telling which operands are on offload, and calling it again on their copies.
Fed with an offload tensor as well, it also fetches that, and makes its result a Slot that goes when the next result comes.
The exit status is 1 where an operation without gradients costs more than its goal (not with --tiny).
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from harness import arguments, compute_device, finish, print_table, synchronize, write_record

import torch_offload

FEATURES = 64
# Microseconds more than on the plain device, without gradients, for one weight.
GOALS = {"linear_without_bias": 5.0, "multiply": 15.0}


def fetch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.is_offload:
        return torch.ops.offload.fetch.default(weight, x.device)
    return torch.ops.aten.alias.default(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(x, weight, bias)


def linear_without_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(x, weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (FEATURES,), bias, bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * bias


def microseconds(call: Callable[[], object], calls: int) -> float:
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - begin
    synchronize()
    return taken / calls * 1e6


def forward_backward(operation: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor, ones: Tensor) -> None:
    operation(x, weight, bias).backward(ones)
    weight.grad = bias.grad = None


def problems(records: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that is missed."""
    found = []
    for record in records:
        goal = GOALS.get(record["operation"])
        more = record["offload_us"] - record["plain_us"]
        if not tiny and goal is not None and record["mode"] == "no_grad" and more > goal:
            found.append(f"{record['operation']} costs the host {more:.1f} us more, and not {goal}.")
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    device = compute_device(options.tiny)
    calls, rounds = (20, 3) if options.tiny else (500, 11)
    torch.manual_seed(0)
    x = torch.randn(8, FEATURES, device=device)
    plain = torch.randn(FEATURES, FEATURES, device=device) * 0.02, torch.randn(FEATURES, device=device)
    weights = tuple(tensor.to("offload") for tensor in plain)
    for tensor in (*plain, *weights):
        tensor.requires_grad_()
    ones = torch.ones_like(x)
    # What an operation gets, and the gradient of its result.
    sides = {
        "plain": ((x, *plain), ones),
        "offload": ((x, *weights), ones),
        "fed": ((x.to("offload"), *weights), ones.to("offload")),
    }

    # The processor's clock, and what CUDA's libraries load when they are first called.
    with torch.no_grad():
        for operands, _ in list(sides.values()) * (1 if options.tiny else 20):
            microseconds(functools.partial(linear, *operands), calls)

    rows, records = [], []
    for operation in (fetch, linear, linear_without_bias, layer_norm, multiply):
        for mode in ("no_grad",) if operation is fetch else ("no_grad", "grad", "grad and backward"):
            compared = {name: side for name, side in sides.items() if not (operation is fetch and name == "fed")}
            times: dict[str, list[float]] = {name: [] for name in compared}
            before = torch_offload.memory_stats()
            for number in range(-2, rounds):
                for name, (operands, gradient) in compared.items():
                    if mode == "grad and backward":
                        call = functools.partial(forward_backward, operation, *operands, gradient)
                    else:
                        call = functools.partial(operation, *operands)
                    with torch.set_grad_enabled(mode != "no_grad"):
                        taken = microseconds(call, calls)
                    if number >= 0:
                        times[name].append(taken)
            after = torch_offload.memory_stats()
            fetches, hits = (after[key] - before[key] for key in ("cache.fetches", "cache.hits"))
            record = {"operation": operation.__name__, "mode": mode}
            record |= {f"{name}_us": median(taken) for name, taken in times.items()}
            records.append(record)
            row = [f"{operation.__name__}, {mode}", f"{record['plain_us']:.2f}"]
            for name in ("offload_us", "fed_us"):
                more = record[name] - record["plain_us"] if name in record else None
                row += ["-", "-"] if more is None else [f"{record[name]:.2f}", f"{more:+.2f}"]
            rows.append([*row, f"{hits / fetches:.3f}" if fetches else "-"])
    columns = [
        "call",
        f"{device.type} us",
        "offload weight",
        "difference",
        "all on offload",
        "difference",
        "cache hits",
    ]
    print_table(columns, rows)
    write_record("overhead", {"runs": records})
    finish(problems(records, options.tiny))


if __name__ == "__main__":
    main()
