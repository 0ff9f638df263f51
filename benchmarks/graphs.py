"""A decode step in a CUDA graph: one token through blocks so small that their launches take longer than their work.

Weights on CUDA, and on offload with all of them on the GPU and with none; called, and replayed from a graph of
``torch.cuda.graph``, or with ``--compiled`` from those of ``torch.compile(mode="reduce-overhead")`` too. The budget decides
which, at a call what the cache keeps and at a capture what the graph holds. The bound is the fastest resident step, and where
nothing stays on the GPU the bytes over the link if that is longer. Results are compared bit for bit with the resident ones, and
the exit status is 1 where they differ.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

sys.path.insert(0, str(Path(__file__).parent))

from blocks import Shape, copied_to, make_blocks, make_input, parameter_bytes
from harness import (
    Step,
    arguments,
    compute_device,
    equal,
    finish,
    link_rates,
    measure,
    ms,
    print_table,
    write_record,
)

import torch_offload

SHAPES = {
    "256 features": Shape(hidden=256, feed_forward=704, heads=4, kv_heads=4),
    "1,024 features": Shape(hidden=1024, feed_forward=2816, heads=8, kv_heads=8),
}
Way = Callable[[nn.Module, Tensor], tuple[Step, Tensor]]


def called(model: nn.Module, x: Tensor) -> tuple[Step, Tensor]:
    return lambda: model(x), model(x)


def captured(model: nn.Module, x: Tensor) -> tuple[Step, Tensor]:
    """A replay, and where it leaves its result."""
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    return graph.replay, y


def compiled(model: nn.Module, x: Tensor) -> tuple[Step, Tensor]:
    """The step, and what it gave once it was a replay."""
    compiled_model = torch.compile(model, mode="reduce-overhead")

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled_model(x)

    for _ in range(4):  # compiled, warmed up, captured and replayed
        result = step().clone()
    return step, result


@torch.no_grad()
def decode(resident: nn.Module, x: Tensor, rounds: int, rate: float, ways: dict[str, Way], keeps: bool) -> list[dict]:
    """A budget's figures. What graphs hold is of one model, so each budget has one of its own."""
    models = {"resident": resident, "offload": copied_to(resident, "offload")}
    variants, same = {}, {}
    for way, steps in ways.items():
        made = {place: steps(model, x) for place, model in models.items()}
        same |= {f"{place}, {way}": equal(result, made["resident"][1]) for place, (_, result) in made.items()}
        variants |= {f"{place}, {way}": step for place, (step, _) in made.items()}
    timed = measure(variants, rounds)
    size = parameter_bytes(resident)
    need = size / rate
    least = min(time.median for name, time in timed.items() if name.startswith("resident"))
    bounds = {name: least if keeps or name.startswith("resident") else max(need, least) for name in timed}
    rows = [[name, ms(time.median), f"{bounds[name] / time.median:.3f}"] for name, time in timed.items()]
    kept = "all weights" if keeps else "nothing"
    print(
        f"\n{size / 1e6:.0f} MB, the link needs {ms(need)} ms; {kept} kept on the GPU; same bits: {all(same.values())}"
    )
    print_table(["one token", "median ms", "bound / it"], rows)
    return [
        {"variant": name, "keeps": keeps, "median": time.median, "bound": bounds[name], "same": same[name]}
        for name, time in timed.items()
    ]


def problems(record: dict[str, list[dict]]) -> list[str]:
    """A sentence for each way whose result on offload has other bits than the resident one."""
    kept = {True: "all weights", False: "nothing"}
    return [
        f"{shape}, {run['variant']}, {kept[run['keeps']]} kept on the GPU: the result differs from the resident model's."
        for shape, runs in record.items()
        for run in runs
        if not run["same"]
    ]


def main() -> None:
    parser = arguments(__doc__, rounds=20)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    device = compute_device(options.tiny)
    rates = link_rates(options.tiny)
    print(rates)
    count, rounds = (2, 2) if options.tiny else (24, options.rounds)
    ways: dict[str, Way] = {"called": called}
    if device.type == "cuda":
        ways["a graph"] = captured
    if options.compiled:
        inductor_config.deterministic = True  # what is chosen by measuring would differ between two compilations
        ways["compiled"] = compiled
    record: dict[str, list[dict]] = {}
    for name, shape in SHAPES.items():
        resident = make_blocks(count, shape, torch.bfloat16, device)
        x = make_input(1, shape, torch.bfloat16, device)
        record[name] = []
        for keeps, budget in ((False, 0), (True, "auto")):
            torch_offload.set_budget(budget)
            record[name] += decode(resident, x, rounds, rates.down, ways, keeps)
    write_record("graphs", record)
    finish(problems(record))


if __name__ == "__main__":
    main()
