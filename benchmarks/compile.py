"""torch.compile over blocks of the Llama-3-8B shape in bfloat16: inductor's code with weights on the GPU and on offload.

Forward through 12 blocks, and forward and backward through 8, each with few tokens, which the link bounds, and with many.
Each model is compiled for each number of tokens, in turns, with nothing taken from a cache, and without Python's garbage
collector, whose pauses of up to a second come whenever. Of the compilations it prints the
least of the seconds until the first step is done, as of those of one model some take a third longer than others, less its
median step later, and the kernels that inductor generated; of the compiled model the time of a step beside

    ideal = max(compiled resident, bytes / link)

where the bytes of a backward are counted as in training.py, and whether the outcome has the bits of the compiled resident
model: the output, or all gradients, these in a compilation of their own under deterministic algorithms, since a resident step's
gradients differ from run to run without. Nothing stays on the GPU from one step to the next.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic algorithms ask for

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import metrics

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, copied_to, gradients, make_blocks, make_input, parameter_bytes
from harness import (
    arguments,
    compute_device,
    deterministic,
    equal,
    finish,
    link_rates,
    measure,
    ms,
    print_table,
    synchronize,
    training_limit,
    write_record,
)

import torch_offload

COMPILATIONS = 3
# Of the ideal, and of the resident model's time; the exit status is 1 where one is missed (not with --tiny).
COMPUTE_BOUND, LINK_BOUND = 0.97, 0.98
MOST_COMPILATION = 1.1
COLUMNS = [
    "work",
    "tokens",
    "weights",
    "compile s",
    "kernels",
    "median ms",
    "least-most",
    "ideal ms",
    "ratio",
    "same bits",
]


def forward_step(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        with torch.no_grad():
            return model(x)

    return step


def training_step(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    grad_output = torch.ones_like(x)

    def step() -> Tensor:
        y = model(x)
        y.backward(grad_output)
        return y.detach()

    return step


def compiled(model: nn.Module, make_step: Callable, x: Tensor) -> tuple[Callable[[], Tensor], Tensor, float, int]:
    """A step of the compiled model, the output of its first, the seconds that this took, and the number of kernels."""
    metrics.reset()
    step = make_step(torch.compile(model, fullgraph=True, dynamic=False), x)
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        output = step()
        synchronize()
        seconds = time.perf_counter() - begin
    finally:
        gc.enable()
    return step, output, seconds, metrics.generated_kernel_count


def deterministic_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """All gradients of a compiled training step under deterministic algorithms, in a compilation of its own."""
    torch.compiler.reset()
    model.zero_grad(set_to_none=True)
    with deterministic(x.is_cuda):
        compiled(model, training_step, x)
    return [value.cpu() for value in gradients(model)]


def compare(work: str, blocks: nn.Sequential, make_step: Callable, x: Tensor, limit: float, rounds: int) -> list[dict]:
    models = {"resident": blocks, "offload": copied_to(blocks, "offload")}
    clear = {name: lambda model=model: model.zero_grad(set_to_none=True) for name, model in models.items()}
    outcomes: dict[str, list[Tensor]] = {}
    if make_step is training_step:
        outcomes = {name: deterministic_gradients(model, x) for name, model in models.items()}
    taken: dict[str, list[float]] = {name: [] for name in models}
    steps, records = {}, {}
    for turn in range(min(rounds, COMPILATIONS)):
        for name, model in reversed(models.items()) if turn % 2 else models.items():
            torch.compiler.reset()  # or the second would be a recompilation of the first one's code
            clear[name]()
            steps[name], output, seconds, kernels = compiled(model, make_step, x)
            if make_step is forward_step:
                outcomes[name] = [output.cpu()]
            taken[name].append(seconds)
            records[name] = {
                "work": work,
                "tokens": x.shape[:2].numel(),
                "variant": name,
                "first steps": taken[name],
                "kernels": kernels,
            }
    times = measure(steps, rounds, prepare=clear)
    ideal = max(times["resident"].median, limit)
    for name, record in records.items():
        pairs = zip(outcomes[name], outcomes["resident"], strict=True)
        # A step takes longer where the link bounds it, which is no part of its compilation.
        record["compile"] = min(taken[name]) - times[name].median
        record |= {"seconds": vars(times[name]), "limit": limit, "ideal": ideal, "ratio": ideal / times[name].median}
        record["same bits"] = all(equal(one, other) for one, other in pairs)
    return list(records.values())


def line(record: dict) -> list[object]:
    return [
        *[record["work"], record["tokens"], record["variant"], f"{record['compile']:.1f}", record["kernels"]],
        ms(record["seconds"]["median"]),
        f"{ms(record['seconds']['least'])}-{ms(record['seconds']['most'])}",
        *[ms(record["ideal"]), f"{record['ratio']:.3f}", "yes" if record["same bits"] else "NO"],
    ]


def problems(records: list[dict]) -> list[str]:
    """A sentence for each goal that is missed."""
    found = []
    for resident, record in zip(records[::2], records[1::2], strict=True):
        where = f"{record['work']} of {record['tokens']} tokens"
        goal = COMPUTE_BOUND if resident["seconds"]["median"] >= record["limit"] else LINK_BOUND
        if record["ratio"] < goal:
            found.append(f"{where}: {record['ratio']:.3f} of the ideal, and not {goal}.")
        if record["compile"] > MOST_COMPILATION * resident["compile"]:
            found.append(
                f"{where}: compiled in {record['compile']:.1f} s, the resident model in {resident['compile']:.1f} s."
            )
        if record["kernels"] != resident["kernels"]:
            found.append(f"{where}: {record['kernels']} kernels, and not {resident['kernels']}.")
    return found


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--only", choices=["forward", "training"], help="one of the two kinds of work")
    options = parser.parse_args()
    device = compute_device(options.tiny)
    torch_offload.set_budget(0)
    inductor_config.force_disable_caches = not options.tiny  # which measures nothing
    inductor_config.deterministic = (
        True  # what is chosen by measuring would differ between two compilations, and bits with it
    )
    torch.compile(torch.sin)(torch.ones(4, device=device))  # the compiler's own start is nobody's
    shape = TINY if options.tiny else LLAMA_8B
    rounds = 1 if options.tiny else options.rounds
    rates = link_rates(options.tiny)
    print(rates, flush=True)

    records: list[dict] = []
    for work, count, lengths in (
        ("forward", 1 if options.tiny else 12, [4] if options.tiny else [1, 16384]),
        ("training", 1 if options.tiny else 8, [4] if options.tiny else [128, 16384]),
    ):
        if options.only not in (None, work):
            continue
        blocks = make_blocks(count, shape, torch.bfloat16, device)
        total = parameter_bytes(blocks)
        limit = training_limit(total, rates) if work == "training" else total / rates.down
        for tokens in lengths:
            x = make_input(tokens, shape, torch.bfloat16, device)
            make_step = forward_step if work == "forward" else training_step
            compared = compare(work, blocks, make_step, x, limit, rounds)
            print_table(
                COLUMNS, [line(record) for record in compared]
            )  # each when it is known: a whole run takes ten minutes
            records += compared
    write_record("compile", {"link": vars(rates), "runs": records})
    if not all(record["same bits"] for record in records):
        raise SystemExit("what the compiled offload model gives differs from what the compiled resident model gives.")
    finish([] if options.tiny else problems(records))


if __name__ == "__main__":
    main()
