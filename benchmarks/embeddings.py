"""Training an embedding table with sparse gradients: 8 million rows of 64 fp32 numbers (2 GB), and SparseAdam (4 GB more).

Each step looks rows up, as many as a batch of a recommender has, and gives them a gradient; the optimizer changes these alone.
Two tables take turns: one on offload of which nothing stays in the cache, whose rows the GPU reads where they are and whose
gradients the host applies; and one that is on the GPU for good, with its optimizer. The ideal is the larger of the resident
time and of what has to cross the link, measured in the same run: rows down, gradients with their places up. The first step's
gradient must have the resident one's bits.
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

    def make_gradient(self, tokens: Tensor, target: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.embedding(tokens), target).backward()
        gradient = self.embedding.weight.grad
        assert gradient is not None
        return gradient

    def step(self, tokens: Tensor, target: Tensor) -> None:
        self.make_gradient(tokens, target)
        self.optimizer.step()


def main() -> None:
    options = arguments(__doc__, rounds=11).parse_args()
    device = compute_device(options.tiny)
    rounds = 2 if options.tiny else options.rounds
    rows, width = (65_536, 16) if options.tiny else (8_000_000, 64)
    torch_offload.set_budget(0)
    values = torch.randn(rows, width)
    tables = {"resident": Table(values.to(device).clone()), "offload": Table(values.to("offload"))}
    del values
    rates = link_rates(options.tiny)
    print(rates)
    lines: list[list[Any]] = []
    records: list[dict[str, Any]] = []
    for count in [16, 64] if options.tiny else [4096, 65_536]:
        tokens = torch.randint(rows, (count,)).to(device)
        target = torch.randn(count, width).to(device)
        gradients = [table.make_gradient(tokens, target).coalesce() for table in tables.values()]
        same = all(equal(part(gradients[1]), part(gradients[0])) for part in (Tensor.indices, Tensor.values))
        del gradients

        gradient, step = (
            {name: functools.partial(method, table, tokens, target) for name, table in tables.items()}
            for method in (Table.make_gradient, Table.step)
        )
        gradient_times, step_times = measure(gradient, rounds), measure(step, rounds)
        down, up = count * width * 4, count * (width * 4 + 8)
        ideal = max(step_times["resident"].median, down / rates.down + up / rates.up)
        for name, table in tables.items():
            own = 0 if name == "offload" else 3 * table.embedding.weight.nbytes
            peak = peak_bytes(step[name], own)
            line = [count, name, ms(gradient_times[name].median), ms(step_times[name].median), ms(ideal)]
            lines.append([*line, f"{ideal / step_times[name].median:.3f}", gib(peak), "yes" if same else "NO"])
            records.append(
                {
                    "rows": count,
                    "weights": name,
                    "gradient": vars(gradient_times[name]),
                    "step": vars(step_times[name]),
                    "ideal": ideal,
                    "peak": peak,
                    "equal": same,
                }
            )
    columns = ["rows", "table", "gradient ms", "and step ms", "ideal ms", "ratio", "peak GiB", "same bits"]
    print_table(columns, lines)
    write_record("embeddings", {"link": vars(rates), "runs": records})
    if not all(record["equal"] for record in records):
        raise SystemExit("a gradient has other bits.")


if __name__ == "__main__":
    main()
