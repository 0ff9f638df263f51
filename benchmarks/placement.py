"""A model on offload that is fed with offload tensors, beside the same model fed with tensors of the compute device.

Fed with offload tensors all operands are on offload, and every result becomes an offload tensor whose bytes stay on the
GPU. First 8 blocks of the Llama-3-8B shape in bfloat16: forward, and forward and backward. Then transformers' greedy
`generate()` of a Llama of that shape with random weights, whose inputs follow `model.device`, where transformers is
installed. Each with all weights in the cache, with a budget of half the weights, and with a budget of 0; `generate()` with a
static cache of keys and values, and of a mixture of experts, with all weights in the cache alone. The exit status is 1 where
bits differ or a goal is missed; --tiny compares bits alone.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, Shape, copied_to, make_blocks, make_input, parameter_bytes
from harness import arguments, compute_device, equal, finish, measure, ms, print_table, write_record

import torch_offload

COLUMNS = ["work", "budget", "fed with", "median ms", "least-most", "x resident", "x fed on CUDA", "same bits"]
# Times what it takes fed with CUDA tensors: fed with offload tensors, at most, by work and budget. None with one token, where
# the host's calls take the time, nor with a budget of 0, where every result goes home. Nor with backward in a half of the
# weights' bytes: what it reads of the forward counts there, and is more.
GOALS = {
    "forward, 1 tokens": {},
    "forward, 4096 tokens": {"automatic": 1.1, "half": 1.25},
    "forward and backward, 4096 tokens": {"automatic": 1.1},
    "generate(), 32 tokens after 128": {"automatic": 1.1},
    "static cache, 32 tokens after 128": {"automatic": 1.1},
    "experts, 32 tokens after 128": {"automatic": 1.1},
}
BUDGETS = ["automatic", "half", "0"]


def passes(model: nn.Module, x: torch.Tensor, grad_output: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    def both() -> torch.Tensor:
        y = model(x)
        y.backward(grad_output)
        return y.detach()

    return forward if grad_output is None else both


def compare(
    work: str,
    steps: dict[str, Callable[[], torch.Tensor]],
    clear: Callable[[], None],
    rounds: int,
    total: int,
    budgets: Sequence[str] = BUDGETS,
) -> list[dict]:
    """Times what is resident and both ways to feed, under each budget; the weights have `total` bytes."""
    values = {"automatic": "auto", "half": total // 2, "0": 0}
    records = []
    truth = steps["resident"]()
    for budget in budgets:
        torch_offload.set_budget(values[budget])
        times = measure(steps, rounds, warmup=3, prepare=dict.fromkeys(steps, clear))
        for name, time in times.items():
            clear()
            record: dict[str, Any] = {"work": work, "budget": budget, "fed": name, "seconds": vars(time)}
            record["slower"] = time.median / times["resident"].median
            record["slower than plain"] = time.median / times["CUDA"].median
            record["equal"] = equal(steps[name](), truth)
            records.append(record)
    clear()
    print_table(COLUMNS, [row(record) for record in records])
    return records


def blocks(tiny: bool, rounds: int, device: torch.device) -> list[dict]:
    shape, counts = (TINY, [8]) if tiny else (LLAMA_8B, [1, 4096])
    resident = make_blocks(2 if tiny else 8, shape, torch.bfloat16, device)
    model = copied_to(resident, "offload")
    total = parameter_bytes(model)
    print(f"{len(resident)} blocks, {total / 1e9:.3f} GB", flush=True)

    def clear() -> None:
        for one in (resident, model):
            one.zero_grad(set_to_none=True)

    records = []
    for tokens in counts:
        x, grad_output = (make_input(tokens, shape, torch.bfloat16, device, seed=seed) for seed in (1, 2))
        for work, gradient in (("forward", None), ("forward and backward", grad_output)):
            if gradient is not None and tokens == 1:
                continue
            steps = {
                "resident": passes(resident, x, gradient),
                "CUDA": passes(model, x, gradient),
                "offload": passes(model, x.to("offload"), None if gradient is None else gradient.to("offload")),
            }
            records += compare(f"{work}, {tokens} tokens", steps, clear, rounds, total)
    return records


def make_language_model(kind: str, shape: Shape, layers: int, transformers: Any) -> nn.Module:
    sizes = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": 32_000,
    }
    if kind == "experts":
        sizes["intermediate_size"] //= 8
        config = transformers.MixtralConfig(**sizes, num_local_experts=8, experts_implementation="eager")
        model = transformers.MixtralForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return model.to(torch.bfloat16).eval()


def generation(tiny: bool, rounds: int, device: torch.device) -> list[dict]:
    try:
        import transformers
    except ImportError as error:
        print(f"generate() is left out ({error.msg})")
        return []
    new, length = (4, 8) if tiny else (32, 128)
    tokens = torch.randint(0, 32_000, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    records = []
    for kind, budgets in (("static cache", ["automatic"]), ("experts", ["automatic"]), ("generate()", BUDGETS)):
        torch.manual_seed(0)
        with torch.device(device):
            resident = make_language_model(kind, *((TINY, 2) if tiny else (LLAMA_8B, 8)), transformers)
        model = copy.deepcopy(resident).to("offload")
        total = parameter_bytes(model)
        print(f"{type(model).__name__} of {len(resident.model.layers)} layers, {total / 1e9:.3f} GB", flush=True)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        if kind == "static cache":
            options |= {"cache_implementation": "static", "disable_compile": True}

        def generate(
            model: nn.Module, tokens: torch.Tensor, options: dict[str, Any] = options
        ) -> Callable[[], torch.Tensor]:
            mask = torch.ones_like(tokens)
            return lambda: model.generate(input_ids=tokens, attention_mask=mask, **options)

        steps = {
            "resident": generate(resident, tokens),
            "CUDA": generate(model, tokens),
            "offload": generate(model, tokens.to(model.device)),
        }
        work = f"{kind}, {new} tokens after {length}"
        records += compare(work, steps, lambda: None, rounds, total, budgets)
        del resident, model, steps
    return records


def row(record: dict[str, Any]) -> list[object]:
    time = record["seconds"]
    return [
        record["work"],
        record["budget"],
        record["fed"],
        ms(time["median"]),
        f"{ms(time['least'])}-{ms(time['most'])}",
        f"{record['slower']:.3f}",
        f"{record['slower than plain']:.3f}",
        "yes" if record["equal"] else "NO",
    ]


def problems(runs: list[dict[str, Any]], tiny: bool) -> list[str]:
    """A sentence for each goal that is missed."""
    found = [
        f"{run['work']}, budget {run['budget']}, fed with {run['fed']}: the output differs from the resident model's."
        for run in runs
        if not run["equal"]
    ]
    for run in runs:
        if tiny or run["fed"] != "offload":
            continue
        goal, slower = GOALS[run["work"]].get(run["budget"]), run["slower than plain"]
        if goal is not None and slower > goal:
            found.append(
                f"{run['work']}, budget {run['budget']}: {slower:.3f} times fed with CUDA tensors, and not {goal}."
            )
    return found


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--only", choices=["blocks", "generation"], help="one of both")
    options: argparse.Namespace = parser.parse_args()
    device = compute_device(options.tiny)
    rounds = 2 if options.tiny else options.rounds
    records = []
    for name, part in (("blocks", blocks), ("generation", generation)):
        if options.only in (None, name):
            records += part(options.tiny, rounds, device)
    write_record("placement", {"runs": records})
    finish(problems(records, options.tiny))


if __name__ == "__main__":
    main()
