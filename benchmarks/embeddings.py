"""Training an embedding table with sparse gradients: 8 million rows of 64 fp32 numbers (2 GB), and SparseAdam (4 GB more).

Each step looks rows up, as many as a batch of a recommender has, and gives them a gradient; the optimizer changes these alone.
Two tables take turns: one on offload of which nothing stays in the cache, whose rows the GPU reads where they are and whose
gradients the host applies; and one that is on the GPU for good, with its optimizer. The optimizer alone steps a third one, too,
that is plain memory of the CPU. The ideal is the larger of the resident time and of what has to cross the link, measured in the
same run: rows down, gradients with their places up. Gradients must have the resident one's bits before the first step, which on
the GPU gives others than on the CPU.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from harness import (
    arguments,
    compute_device,
    equal,
    gib,
    link_rates,
    measure,
    ms,
    peak_bytes,
    print_table,
    write_record,
)

import torch_offload


class Table:
    """An embedding with its optimizer."""

    def __init__(self, weight: Tensor) -> None:
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        self.optimizer = torch.optim.SparseAdam(self.embedding.parameters(), lr=0.01)

    def make_gradient(self, tokens: Tensor, target: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.embedding(tokens), target).backward()

    def gradient(self) -> Tensor:
        gradient = self.embedding.weight.grad
        assert gradient is not None
        return gradient

    def take_gradient(self, other: "Table") -> None:
        self.embedding.weight.grad = other.gradient().to(self.embedding.weight.device)

    def step(self, tokens: Tensor, target: Tensor) -> None:
        self.make_gradient(tokens, target)
        self.optimizer.step()


def same_gradients(first: Table, second: Table) -> bool:
    return all(equal(part(first.gradient()), part(second.gradient())) for part in (Tensor._indices, Tensor._values))


def main() -> None:
    options = arguments(__doc__, rounds=11).parse_args()
    device = compute_device(options.tiny)
    rounds = 2 if options.tiny else options.rounds
    rows, width = (65_536, 16) if options.tiny else (8_000_000, 64)
    torch_offload.set_budget(0)
    values = torch.randn(rows, width)
    tables = {"resident": Table(values.to(device).clone()), "offload": Table(values.to("offload"))}
    plain = Table(values)
    rates = link_rates(options.tiny)
    print(rates)
    lines: list[list[Any]] = []
    records: list[dict[str, Any]] = []
    batches = [
        (torch.randint(rows, (count,)).to(device), torch.randn(count, width).to(device))
        for count in ([16, 64] if options.tiny else [4096, 65_536])
    ]
    for batch in batches:
        for table in tables.values():
            table.make_gradient(*batch)
        if not same_gradients(tables["offload"], tables["resident"]):
            raise SystemExit(f"a gradient of {len(batch[0])} rows has other bits.")
    for tokens, target in batches:
        count = len(tokens)
        gradient, step = (
            {name: functools.partial(method, table, tokens, target) for name, table in tables.items()}
            for method in (Table.make_gradient, Table.step)
        )
        optimizer = {name: table.optimizer.step for name, table in {**tables, "CPU": plain}.items()}
        given = {**gradient, "CPU": functools.partial(plain.take_gradient, tables["offload"])}
        times = {
            "gradient": measure(gradient, rounds),
            "optimizer": measure(optimizer, rounds, prepare=given),
            "step": measure(step, rounds),
        }
        down, up = count * width * 4, count * (width * 4 + 8)
        ideal = max(times["step"]["resident"].median, down / rates.down + up / rates.up)
        for name in optimizer:
            taken = {what: by_name[name] for what, by_name in times.items() if name in by_name}
            line = [ms(taken[what].median) if what in taken else "-" for what in times]
            peak, ratio = None, "-"
            if name in tables:
                peak = peak_bytes(step[name], 0 if name == "offload" else 3 * tables[name].embedding.weight.nbytes)
                ratio = f"{ideal / taken['step'].median:.3f}"
            lines.append([count, name, *line, ms(ideal), ratio, gib(peak)])
            seconds = {what: vars(time) for what, time in taken.items()}
            records.append({"rows": count, "table": name, "seconds": seconds, "ideal": ideal, "peak": peak})
    columns = ["rows", "table", "gradient ms", "optimizer ms", "both ms", "ideal ms", "ratio", "peak GiB"]
    print_table(columns, lines)
    write_record("embeddings", {"link": vars(rates), "runs": records})


if __name__ == "__main__":
    main()
