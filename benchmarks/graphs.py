"""A decode step in a CUDA graph: one token through blocks so small that their launches take longer than their work.

Weights on CUDA, and on offload with all of them on the GPU and with none; called, and replayed from a graph of
``torch.cuda.graph``, or with ``--compiled`` from those of ``torch.compile(mode="reduce-overhead")`` too. The budget decides
which, at a call what the cache keeps and at a capture what the graph holds. The bound is the resident graph, and where
nothing stays on the GPU the bytes over the link if that is longer. Results are compared bit for bit with the resident ones.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from blocks import Shape, copied_to, make_blocks, make_input, parameter_bytes
from harness import Step, arguments, compute_device, equal, link_rates, measure, ms, print_table, write_record

import torch_offload

SHAPES = {
    "256 features": Shape(hidden=256, feed_forward=704, heads=4, kv_heads=4),
    "1,024 features": Shape(hidden=1024, feed_forward=2816, heads=8, kv_heads=8),
}
# A graph reads what an earlier one holds, so that which is to hold nothing is captured first.
BUDGETS: dict[str, str | int] = {"streamed": 0, "on the GPU": "auto"}


def captured(model: nn.Module, x: Tensor, budget: str | int = "auto") -> tuple[torch.cuda.CUDAGraph, Tensor]:
    torch_offload.set_budget(budget)
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = model(x)
    return graph, y


def called(model: nn.Module, x: Tensor, budget: str | int) -> Step:
    def step() -> None:
        torch_offload.set_budget(budget)
        model(x)

    return step


def compiled(model: nn.Module, x: Tensor, budget: str | int = "auto") -> tuple[Step, Tensor]:
    """The step, and what it gave once it was a replay."""
    torch_offload.set_budget(budget)
    compiled_model = torch.compile(model, mode="reduce-overhead")

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled_model(x)

    for _ in range(4):  # compiled, warmed up, captured and replayed
        result = step().clone()
    return step, result


@torch.no_grad()
def decode(
    shape: Shape, count: int, rounds: int, rate: float, device: torch.device, *, with_compiled: bool
) -> list[dict]:
    resident = make_blocks(count, shape, torch.bfloat16, device)
    offloaded = copied_to(resident, "offload")
    x = make_input(1, shape, torch.bfloat16, device)
    variants = {"resident": lambda: resident(x)}
    variants |= {f"offload, {name}": called(offloaded, x, budget) for name, budget in BUDGETS.items()}
    same = equal(offloaded(x), resident(x))
    if device.type == "cuda":
        graphs = {"resident": captured(resident, x)}
        graphs |= {f"offload, {name}": captured(offloaded, x, budget) for name, budget in BUDGETS.items()}
        for name, (graph, y) in graphs.items():
            graph.replay()
            same = same and equal(y, graphs["resident"][1])
            variants[f"{name}, a graph"] = graph.replay
    if with_compiled:
        steps = {"resident": compiled(resident, x)}
        # A model each: graphs of one would share what one of them holds.
        steps |= {f"offload, {name}": compiled(copied_to(resident, "offload"), x, to) for name, to in BUDGETS.items()}
        for name, (step, y) in steps.items():
            same = same and equal(y, steps["resident"][1])
            variants[f"{name}, compiled"] = step
    timed = measure(variants, rounds)
    torch_offload.set_budget("auto")
    need = parameter_bytes(offloaded) / rate
    least = timed.get("resident, a graph", timed["resident"]).median
    bounds = {name: max(need, least) if "streamed" in name else least for name in timed}
    rows = [[name, ms(time.median), f"{bounds[name] / time.median:.3f}"] for name, time in timed.items()]
    print(
        f"\n{count} blocks, {parameter_bytes(offloaded) / 1e6:.0f} MB, the link needs {ms(need)} ms; same bits: {same}"
    )
    print_table(["one token", "median ms", "bound / it"], rows)
    return [
        {"variant": name, "median": time.median, "bound": bounds[name], "same": same} for name, time in timed.items()
    ]


def main() -> None:
    parser = arguments(__doc__, rounds=20)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    device = compute_device(options.tiny)
    rates = link_rates(options.tiny)
    print(rates)
    count, rounds = (2, 2) if options.tiny else (24, options.rounds)
    record = {
        name: decode(shape, count, rounds, rates.down, device, with_compiled=options.compiled)
        for name, shape in SHAPES.items()
    }
    write_record("graphs", record)


if __name__ == "__main__":
    main()
