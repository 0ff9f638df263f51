"""Forward through 12 blocks of the Llama-3-8B shape in bfloat16 (5.2 GB): weights on the GPU, on offload, and by a peer.

No scheme that streams S bytes over a link of B bytes a second can beat ideal = max(resident, S / B). The ratio ideal /
measured is printed for each way and number of tokens, and whether the output has the resident model's bits. Nothing stays on
the GPU from one pass to the next; residency.py measures what that changes. The exit status is 1 where bits differ or the ratio
of the offload model is below its goal; --tiny compares bits alone.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, make_blocks, make_input, parameter_bytes
from harness import (
    arguments,
    below_goals,
    compute_device,
    equal,
    finish,
    gib,
    link_rates,
    measure,
    ms,
    peak_bytes,
    print_table,
    write_record,
)
from peers import close_variants, make_variants

import torch_offload

# Of the ratio, by tokens.
GOALS = {1: 0.99, 2048: 0.99, 8192: 0.97, 16384: 0.97, 32768: 0.99}


def problems(records: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that the offload model misses."""
    records = [record for record in records if record["variant"] == "offload"]
    found = [
        f"{record['tokens']} tokens: the output differs from the resident model's."
        for record in records
        if not record["equal"]
    ]
    return found if tiny else found + below_goals(records, GOALS)


def main() -> None:
    options = arguments(__doc__, rounds=9).parse_args()
    device = compute_device(options.tiny)
    torch_offload.set_budget(0)
    shape, count = (TINY, 3) if options.tiny else (LLAMA_8B, 12)
    lengths = [1, 32] if options.tiny else [1, 2048, 8192, 16384, 32768]
    rounds = 2 if options.tiny else options.rounds

    resident = make_blocks(count, shape, torch.bfloat16, device)
    models = make_variants(resident, device)
    total = parameter_bytes(resident)
    rates = link_rates(options.tiny)
    print(f"{count} blocks, {total / 1e9:.3f} GB; {rates}", flush=True)

    rows, records = [], []
    with torch.no_grad():
        for tokens in lengths:
            x = make_input(tokens, shape, torch.bfloat16, device)
            truth = resident(x)
            same = {name: equal(model(x), truth) for name, model in models.items()}
            steps = {name: functools.partial(model, x) for name, model in models.items()}
            times = measure(steps, rounds)
            peaks = {name: peak_bytes(step, total if name == "resident" else 0) for name, step in steps.items()}
            ideal = max(times["resident"].median, total / rates.down)
            for name, time in times.items():
                ratio = ideal / time.median
                spread = f"{ms(time.least)}-{ms(time.most)}"
                answer = "yes" if same[name] else "NO"
                rows.append(
                    [tokens, name, ms(time.median), spread, ms(ideal), f"{ratio:.3f}", answer, gib(peaks[name])]
                )
                records.append(
                    {"tokens": tokens, "variant": name, "seconds": vars(time), "ideal": ideal, "ratio": ratio}
                    | {"equal": same[name], "peak_bytes": peaks[name]}
                )
    print_table(["tokens", "weights", "median ms", "least-most", "ideal ms", "ratio", "same bits", "peak GiB"], rows)
    write_record("forward", {"blocks": count, "bytes": total, "link": vars(rates), "runs": records})
    close_variants(models)
    finish(problems(records, options.tiny))


if __name__ == "__main__":
    main()
