"""GPU memory of a training step above what its activations take: no more than the ring and the largest operation's operands.

The activations' share is the peak of the same step with resident weights whose gradients are dropped as they are made, less the
weights. What the offload model takes above that must stay within

    max(ring, 2 x largest weight) + largest weight + its gradient

for every ring, with no budget beside it: a fetch may always exceed the ring up to twice its own bytes, and the weight and the
gradient of the operation that is running are held. Blocks are of the Llama-3-8B shape in bfloat16. The exit status is 1 if a
bound is exceeded.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, copied_to, make_blocks, make_input, parameter_bytes
from harness import arguments, compute_device, mib, peak_bytes, print_table, write_record

import torch_offload


def drop_gradients(model: nn.Module) -> None:
    """Gives every gradient up the moment it is made."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)


def main() -> None:
    options = arguments(__doc__).parse_args()
    device = compute_device(options.tiny)
    torch_offload.set_budget(0)
    shape, count, tokens = (TINY, 3, 32) if options.tiny else (LLAMA_8B, 8, 4096)
    rings = [1 << 14, 1 << 16] if options.tiny else [128 << 20, 512 << 20, 1 << 30]

    resident = make_blocks(count, shape, torch.bfloat16, device)
    model = copied_to(resident, "offload")
    drop_gradients(resident)
    largest = max(parameter.nbytes for parameter in resident.parameters())
    x = make_input(tokens, shape, torch.bfloat16, device)
    grad_output = make_input(tokens, shape, torch.bfloat16, device, seed=2)

    rows, records = [], []
    for train in (False, True):

        def step(model: nn.Module, train: bool = train) -> None:
            model.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(train):
                output = model(x)
            if train:
                output.backward(grad_output)

        # The first steps also make cuBLAS's workspaces.
        step(resident)
        step(model)
        activations = peak_bytes(lambda: step(resident))
        for ring in rings:
            torch_offload.set_ring_bytes(ring)
            torch_offload.empty_cache()
            torch.offload.reset_peak_memory_stats()
            peak = peak_bytes(lambda: step(model))
            if peak is None:
                step(model)
            slots = torch_offload.memory_stats()["device.slot_bytes.peak"]
            bound = max(ring, 2 * largest) + (2 if train else 1) * largest
            above = slots if peak is None or activations is None else peak - activations
            what = "forward and backward" if train else "forward"
            answer = "yes" if above <= bound else "NO"
            rows.append([what, *map(mib, (ring, activations, peak, slots, above, bound)), answer])
            records.append(
                {"train": train, "ring": ring, "activations": activations, "peak": peak, "slots": slots}
                | {"above": above, "bound": bound}
            )
    size, most = f"{parameter_bytes(resident) / 1e9:.3f} GB", f"{mib(largest)} MiB"
    print(f"{count} blocks, {size}, the largest weight {most}; {tokens} tokens; all in MiB")
    print_table(["step", "ring", "activations", "peak", "Slots", "above", "bound", "within"], rows)
    write_record("memory", {"blocks": count, "tokens": tokens, "largest": largest, "runs": records})
    if any(record["above"] > record["bound"] for record in records):
        raise SystemExit("GPU memory exceeds its bound.")


if __name__ == "__main__":
    main()
