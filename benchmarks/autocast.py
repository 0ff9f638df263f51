"""fp32 weights under autocast to bfloat16: cast on the GPU, or by copies that the host keeps.

8 blocks of the Llama-3-8B shape (6.98 GB in fp32, 3.49 in bfloat16), weights on the GPU and on offload, with
set_autocast_copies() and without, and nothing kept on the GPU from one use to the next: forward of 2,048 tokens, four
micro-batches of 4,096 and of 16,384 tokens whose gradients add up, and training steps with AdamW on the host (PyTorch's fused
one), two on end. The ideal of a forward is max(resident, what travels / the link's rate). The exit status is 1 where bits
differ or a forward falls below its goal; --tiny compares bits alone.
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
    Timing,
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
    write_record,
)

import torch_offload

GOAL = 0.98  # of the ideal
MICRO_BATCHES = 4
NAMES = ("resident", "offload", "offload, copies")


class Models:
    """The same blocks three times; whoever runs one sets what it is for."""

    def __init__(self, tiny: bool, device: torch.device) -> None:
        shape, count = (TINY, 3) if tiny else (LLAMA_8B, 8)
        resident = make_blocks(count, shape, torch.float32, device)
        self.by_name = {"resident": resident} | {name: copied_to(resident, "offload") for name in NAMES[1:]}
        self.bytes = parameter_bytes(resident)
        self.shape, self.device, self.tiny = shape, device, tiny

    def bind(self, function: Callable[[nn.Module], object]) -> dict[str, Callable[[], object]]:
        """The function for each of the models, as a step."""

        def step(name: str) -> object:
            torch_offload._C.set_autocast_copies(name == NAMES[2], least_bytes=0 if self.tiny else 1 << 20)
            return function(self.by_name[name])

        return {name: functools.partial(step, name) for name in NAMES}

    def inputs(self, tokens: int, count: int) -> list[Tensor]:
        return [make_input(tokens, self.shape, torch.float32, self.device, seed=k) for k in range(count)]


def lowered(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return model(x)


def records(part: str, tokens: int, times: dict[str, Timing], ideals: dict[str, float], same: dict[str, bool]) -> list:
    return [
        {"part": part, "tokens": tokens, "variant": name, "seconds": vars(time), "equal": same[name]}
        | {"ideal": ideals.get(name), "ratio": ideals[name] / time.median if name in ideals else None}
        for name, time in times.items()
    ]


def forward(models: Models, rounds: int, rate: float) -> list[dict]:
    tokens = 32 if models.tiny else 2048
    (x,) = models.inputs(tokens, 1)
    with torch.no_grad():
        steps = models.bind(lambda model: lowered(model, x))
        results = {name: [step() for _ in range(2)][-1] for name, step in steps.items()}
        same = {name: equal(results["resident"], result) for name, result in results.items()}
        del results
        times = measure(steps, rounds)
    travels = {"resident": 0, "offload": models.bytes, "offload, copies": models.bytes / 2}
    ideals = {name: max(times["resident"].median, count / rate) for name, count in travels.items()}
    return records("forward", tokens, times, ideals, same)


def accumulation(models: Models, rounds: int, tokens: int) -> list[dict]:
    inputs = models.inputs(tokens, MICRO_BATCHES)

    def step(model: nn.Module) -> None:
        for x in inputs:
            y = lowered(model, x)
            y.backward(torch.ones_like(y))

    def clear(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)

    steps, prepare = models.bind(step), models.bind(clear)
    found = {}
    with deterministic(torch.cuda.is_available()):
        for name in NAMES:
            prepare[name]()
            steps[name]()
            found[name] = [gradient.cpu() for gradient in gradients(models.by_name[name])]
    same = {
        name: all(equal(*pair) for pair in zip(mine, found["resident"], strict=True)) for name, mine in found.items()
    }
    del found
    gc.collect()
    times = measure(steps, rounds, prepare=prepare)
    for clears in prepare.values():
        clears()
    return records("accumulation", tokens, times, {}, same)


def training(models: Models, rounds: int) -> list[dict]:
    """The resident model has no step here: its optimizer would be the GPU's."""
    tokens = 16 if models.tiny else 4096
    (x,) = models.inputs(tokens, 1)
    optimizers = {
        id(model): torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True) for model in models.by_name.values()
    }

    def step(model: nn.Module) -> None:
        for _ in range(2):
            optimizers[id(model)].zero_grad(set_to_none=True)
            y = lowered(model, x)
            y.backward(torch.ones_like(y))
            optimizers[id(model)].step()

    steps = models.bind(step)
    del steps["resident"]
    with deterministic(torch.cuda.is_available()):
        for run in steps.values():
            run()
        synchronize()
        weights = [[p.detach().cpu() for p in models.by_name[name].parameters()] for name in steps]
        same = all(equal(*pair) for pair in zip(*weights, strict=True))
    del weights
    gc.collect()
    times = measure(steps, rounds)
    return records("two training steps", tokens, times, {}, dict.fromkeys(steps, same))


def problems(runs: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that is missed."""
    found = [
        f"{run['part']} of {run['tokens']} tokens, {run['variant']}: other bits than the resident model's."
        for run in runs
        if not run["equal"]
    ]
    return found + [
        f"{run['part']}, {run['variant']}: {run['ratio']:.3f} of the ideal, and not {GOAL}."
        for run in runs
        if not tiny and run["ratio"] is not None and run["ratio"] < GOAL
    ]


def main() -> None:
    options = arguments(__doc__, rounds=5).parse_args()
    device = compute_device(options.tiny)
    rounds = 2 if options.tiny else options.rounds
    torch_offload.set_budget(0)
    models = Models(options.tiny, device)
    rates = link_rates(options.tiny)
    print(f"{models.bytes / 1e9:.3f} GB in fp32; {rates}", flush=True)
    runs = forward(models, rounds, rates.down)
    for tokens in (16,) if options.tiny else (4096, 16384):
        runs += accumulation(models, rounds, tokens)
    runs += training(models, rounds)
    columns = ["part", "tokens", "weights", "median ms", "least-most", "ideal ms", "ratio", "same bits"]
    rows = [
        [
            *(run["part"], run["tokens"], run["variant"], ms(run["seconds"]["median"])),
            f"{ms(run['seconds']['least'])}-{ms(run['seconds']['most'])}",
            *(("-", "-") if run["ideal"] is None else (ms(run["ideal"]), f"{run['ratio']:.3f}")),
            "yes" if run["equal"] else "NO",
        ]
        for run in runs
    ]
    print_table(columns, rows)
    write_record("autocast", {"bytes": models.bytes, "link": vars(rates), "runs": runs})
    finish(problems(runs, options.tiny))


if __name__ == "__main__":
    main()
