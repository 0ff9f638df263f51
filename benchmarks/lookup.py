"""Lookups in a table that the cache has no room for: Llama 3 8B's embedding, 128,256 rows of 4,096 bf16 numbers (1.05 GB).

Three variants take turns: rows that the kernel reads where they are, in page-locked host memory; the table fetched whole, and
looked up on the GPU; and a table that is there for good. The cache is emptied before each, as other weights would push the
table out. The ideal is the larger of the resident time and of the rows' bytes over the link, which is measured in the same run.
With --compiled each is a graph of inductor's, which also normalises what it has looked up.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.nn.functional import embedding, rms_norm

sys.path.insert(0, str(Path(__file__).parent))

from harness import arguments, compute_device, equal, link_rates, measure, print_table, write_record

import torch_offload


def fetched(tokens: Tensor, weight: Tensor) -> Tensor:
    return embedding(tokens, weight.to(tokens.device))


def normed(tokens: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(embedding(tokens, weight), weight.shape[1:])


def fetched_and_normed(tokens: Tensor, weight: Tensor) -> Tensor:
    return normed(tokens, weight.to(tokens.device))


def read_bytes(look_up: Callable[[], Tensor]) -> int:
    """What a lookup reads in place."""
    torch_offload.empty_cache()
    before = torch_offload.stats()["bytes_read_in_place"]
    look_up()
    return torch_offload.stats()["bytes_read_in_place"] - before


def main() -> None:
    parser = arguments(__doc__, rounds=21)
    parser.add_argument("--compiled", action="store_true", help="time graphs of inductor's")
    options = parser.parse_args()
    device = compute_device(options.tiny)
    rounds = 2 if options.tiny else options.rounds
    rows, width = (16_384, 64) if options.tiny else (128_256, 4096)
    counts = [1, 16] if options.tiny else [1, 128, 2048, 16_384]
    torch_offload.set_budget(0)
    weight = torch.randn(rows, width).bfloat16().to("offload")
    resident = weight.to(device).clone()
    look_up, look_up_fetched = embedding, fetched
    if options.compiled:
        inductor_config.deterministic = True  # what is chosen by measuring would differ between two compilations
        look_up, look_up_fetched = (
            torch.compile(normed, dynamic=False),
            torch.compile(fetched_and_normed, dynamic=False),
        )
    rates = link_rates(options.tiny)
    print(rates)
    table: list[list[Any]] = []
    records: list[dict[str, Any]] = []
    with torch.no_grad():
        for count in counts:
            tokens = torch.randint(rows, (count,)).to(device)
            variants = {
                "in place": functools.partial(look_up, tokens, weight),
                "fetched": functools.partial(look_up_fetched, tokens, weight),
                "resident": functools.partial(look_up, tokens, resident),
            }
            expected = variants["resident"]() if options.compiled else resident[tokens]
            read = read_bytes(variants["in place"])
            same = all(equal(variant(), expected) for variant in variants.values())
            times = measure(variants, rounds, prepare=dict.fromkeys(variants, torch_offload.empty_cache))
            ideal = max(times["resident"].median, count * width * 2 / rates.down)
            medians = {name: time.median for name, time in times.items()}
            row = [count, *(f"{1e3 * median:.3f}" for median in medians.values()), f"{1e3 * ideal:.3f}"]
            table.append([*row, f"{ideal / medians['in place']:.3f}", read, "yes" if same else "NO"])
            records.append({"tokens": count, "seconds": {name: vars(time) for name, time in times.items()}})
            records[-1] |= {"ideal": ideal, "read": read, "equal": same}
    print_table(["rows", "in place ms", "fetched", "resident", "ideal", "ratio", "bytes read", "equal"], table)
    write_record("lookup-compiled" if options.compiled else "lookup", {"link": vars(rates), "runs": records})
    if not all(record["equal"] for record in records):
        raise SystemExit("a lookup gave other rows.")


if __name__ == "__main__":
    main()
