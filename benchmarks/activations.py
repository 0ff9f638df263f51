"""Forward and backward through blocks of the Llama-3-8B shape in bfloat16, with what autograd saves kept in host memory.

The weights are on the GPU, or, in the last variants, on offload. Without checkpointing, of 8 blocks, as much of what is saved
goes to the host as the link hides, or as budgets of GPU memory demand, which shows step time against peak memory; with
non-reentrant checkpointing of each of 16 blocks, the inputs of the blocks. With U bytes that cross the link up in forward and
down in backward, at B bytes a second each way,

    ideal = max(plain forward, U / B) + max(plain backward, U / B)

for weights on the GPU. The peak is that of a step that adds to gradients, above weights and gradients; `saved` is how much
lower it is than the plain variant's. `automatic` chooses by itself how much goes, and says it. Gradients are compared bit for
bit in steps of their own, with deterministic algorithms and flash attention (cuDNN's backward is not deterministic). Peers, in
the same run: PyTorch's save_on_cpu(pin_memory=True), torchtune's OffloadActivations, and RamTorch's model with its activations
offloaded, which streams its weights as well.
"""

import argparse
import contextlib
import functools
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, copied_to, gradients, make_blocks, make_input, parameter_bytes
from harness import (
    LinkRates,
    arguments,
    compute_device,
    deterministic,
    equal,
    gib,
    link_rates,
    measure,
    ms,
    peak_bytes,
    print_table,
    record_folder,
    seconds,
    synchronize,
    write_record,
)
from peers import save_activations_by_torchtune, stream_blocks

import torch_offload

COLUMNS = ["tokens", "checkpoints", "variant", "median ms", "least-most", "x plain", "ideal ms", "ratio", "peak GiB"]
COLUMNS += ["saved GiB", "up GB", "same bits"]

AUTOMATIC = "saved_tensors, automatic"
STREAMED = ["weights on offload", "both on offload"]
EVERYTHING = "saved_tensors, everything"
BUDGETS = [6, 4, 2]  # GiB

Forward = Callable[[Tensor], Tensor]
Region = Callable[[], AbstractContextManager]


def make_forward(blocks: nn.Sequential, region: Region, checkpointed: bool) -> Forward:
    """Runs all blocks, each within a region of its own."""

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            with region():
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return x

    return forward


def make_step(forward: Forward, x: Tensor, grad_output: Tensor) -> Callable[[], None]:
    def step() -> None:
        # As after an embedding: the input is a result, and nobody else holds it.
        forward(x + x.new_zeros((), requires_grad=True)).backward(grad_output)

    return step


def make_variants(
    resident: nn.Sequential, checkpointed: bool, tiny: bool
) -> tuple[dict[str, tuple[nn.Sequential, Forward]], dict[str, torch_offload.saved_tensors]]:
    """By name, the blocks whose gradients a variant makes, and how it runs; and the regions that choose by themselves."""
    least, unit = (0, 1 << 10) if tiny else (1 << 20, 1 << 30)
    region = torch_offload.saved_tensors(min_bytes=least)
    automatic = {AUTOMATIC: torch_offload.saved_tensors(min_bytes=least, share="auto")}
    for budget in [] if checkpointed else BUDGETS:
        automatic[f"saved_tensors, {budget} GiB stay"] = torch_offload.saved_tensors(
            min_bytes=least, share="auto", max_gpu_bytes=budget * unit
        )
    on_cpu = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.cuda.is_available())
    streamed = copied_to(resident, "offload")

    def variant(blocks: nn.Sequential, region: Region = contextlib.nullcontext) -> tuple:
        return blocks, make_forward(blocks, region, checkpointed)

    variants = {"plain": variant(resident)}
    for name in automatic:
        variants[name] = variant(resident, functools.partial(automatic.get, name))
    variants[EVERYTHING] = variant(resident, lambda: region)
    variants["save_on_cpu"] = variant(resident, on_cpu)
    torchtune = save_activations_by_torchtune()
    if torchtune is not None:
        variants["torchtune"] = variant(resident, torchtune)
    for name, around in zip(STREAMED, (contextlib.nullcontext, lambda: region), strict=True):
        variants[name] = variant(streamed, around)
    return variants, automatic


def compare(
    resident: nn.Sequential,
    x: Tensor,
    grad_output: Tensor,
    checkpointed: bool,
    rates: LinkRates,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Runs the variants on one input: a record of each."""
    rounds, tokens = 2 if options.tiny or checkpointed else options.rounds, x.shape[:-1].numel()
    variants, automatic = make_variants(resident, checkpointed, options.tiny)

    def wanted(name: str) -> bool:
        return name == "plain" or any(text in name for text in options.only)

    variants = {name: variant for name, variant in variants.items() if wanted(name)}
    steps = {name: make_step(forward, x, grad_output) for name, (_, forward) in variants.items()}
    clear = {name: functools.partial(blocks.zero_grad, set_to_none=True) for name, (blocks, _) in variants.items()}
    with_peer = not checkpointed and wanted("RamTorch")
    peer = None if not with_peer else stream_blocks(resident, x.device, True, offload_activations=True)
    if peer is not None:
        steps["RamTorch"], clear["RamTorch"] = lambda: peer.step(x, grad_outputs=grad_output), peer.zero_grad
    for name in [] if checkpointed else [name for name in automatic if name in steps]:
        for _ in range(2 if options.tiny else 24):  # which it learns from
            clear[name]()
            steps[name]()
            synchronize()
    times = {}
    # Offload weights that are expected for the next step take room of the ring, so others have their turns before them.
    for streams in (False, True):
        turns = {name: step for name, step in steps.items() if (name in STREAMED) == streams}
        times |= measure(turns, rounds, prepare=clear)
    with torch.no_grad():
        forward = measure({"forward": lambda: variants["plain"][1](x)}, rounds)["forward"].median
    backward = times["plain"].median - forward

    records: list[dict[str, Any]] = []
    truth: list[Tensor] = []
    for name, time in times.items():
        for clear_one in clear.values():
            clear_one()
        steps[name]()  # leaves gradients, which the peak is not to be one of
        before = torch_offload.memory_stats()["link.bytes_to_host"]
        peak = peak_bytes(steps[name])
        if peak is None:
            steps[name]()
        up = torch_offload.memory_stats()["link.bytes_to_host"] - before
        record = {"tokens": tokens, "checkpointed": checkpointed, "variant": name, "seconds": vars(time)}
        record["parameters"] = parameter_bytes(resident)
        record |= {"slower": time.median / times["plain"].median, "peak": peak, "bytes_up": up}
        if name in variants:
            blocks = variants[name][0]
            clear[name]()
            with deterministic(x.is_cuda):
                steps[name]()
            made = [gradient.to(x.device) for gradient in gradients(blocks)]
            truth = truth or [gradient.clone() for gradient in made]
            record["equal"] = all(map(equal, made, truth))
            if blocks is resident:
                record["ideal"] = max(forward, up / rates.up) + max(backward, up / rates.down)
                record["saved"] = None if peak is None else (records[0] if records else record)["peak"] - peak
        records.append(record)
        if options.traces and name.startswith("saved_tensors"):
            clear[name]()
            with torch_offload.trace(record_folder() / f"{re.sub(r'[^a-z0-9]+', '_', name)}_{tokens}.trace.json"):
                seconds(steps[name])
    for name, region in automatic.items():
        print(f"{name}, {tokens} tokens: {region.plan}", flush=True)
    if peer is not None:
        peer.close()
    return records


def row(record: dict[str, Any]) -> list[object]:
    time, ideal = record["seconds"], record.get("ideal")
    return [
        record["tokens"],
        record["checkpointed"],
        record["variant"],
        ms(time["median"]),
        f"{ms(time['least'])}-{ms(time['most'])}",
        f"{record['slower']:.3f}",
        ms(ideal) if ideal else "-",
        f"{ideal / time['median']:.3f}" if ideal else "-",
        gib(record["peak"]),
        gib(record.get("saved")),
        f"{record['bytes_up'] / 1e9:.2f}",
        {True: "yes", False: "NO", None: "-"}[record.get("equal")],
    ]


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        default=[""],
        help="of the variants, plain and those with a TEXT in their name",
    )
    parser.add_argument("--tokens", nargs="+", type=int, metavar="N", help="only the cases of so many tokens")
    parser.add_argument(
        "--traces", action="store_true", help="also a trace of a step of each saved_tensors, beside the record"
    )
    options = parser.parse_args()
    device = compute_device(options.tiny)
    torch_offload.set_budget(0)
    shape = TINY if options.tiny else LLAMA_8B
    full = [(8, 8192, False), (16, 16384, True), (16, 32768, True)]
    cases = [(4, 16, False), (4, 32, True)] if options.tiny else full
    cases = [case for case in cases if not options.tokens or case[1] in options.tokens]
    if not cases:
        raise SystemExit(f"no case of {options.tokens} tokens; there are {sorted({case[1] for case in full})}.")
    rates = link_rates(options.tiny)
    records = []
    for count, tokens, checkpointed in cases:
        resident = make_blocks(count, shape, torch.bfloat16, device)
        print(f"{count} blocks, {parameter_bytes(resident) / 1e9:.3f} GB; {rates}", flush=True)
        x, grad_output = (make_input(tokens, shape, torch.bfloat16, device, seed=seed) for seed in (1, 2))
        records += compare(resident, x, grad_output, checkpointed, rates, options)
    print_table(COLUMNS, [row(record) for record in records])
    write_record("activations", {"link": vars(rates), "runs": records})
    if not all(record.get("equal", True) for record in records):
        raise SystemExit("gradients differ from the plain variant's.")


if __name__ == "__main__":
    main()
