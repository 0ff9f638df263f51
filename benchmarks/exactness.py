"""24 transformer blocks with their weights on offload, bit for bit against the same blocks on CUDA.

Blocks of two kinds take turns (RMSNorm, grouped attention and SwiGLU without biases; PyTorch's encoder layer with LayerNorm and
biases), 2,048 features and 8,192 in the feed-forward net. In every iteration the output, the gradient of the input and the
gradient of every parameter must be `torch.equal` to CUDA's under deterministic algorithms; gradients are read the moment
`backward` returns, some of them on the host and then all on the GPU. Between iterations both models' weights change in place,
on the host for offload, so that a stale copy shows. The exit status is 1 if anything differs.

--delay makes every copy wait on its stream, --poison fills device memory that is given up and host memory that is not written
yet, and gives every cached copy up at once. --saved has what autograd saves on the host too: everything, what the link hides,
or what has to go for the rest to keep to so many GiB. Where there is no GPU, TORCH_OFFLOAD_LINK=sim runs it on the simulated
link.
"""

import contextlib
import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from blocks import Block, Shape, copied_to, fill_normal, gradients, make_input
from harness import arguments, compute_device, equal, write_record

import torch_offload

# Products with these are rounded the same way on the host and on the GPU, and their product over a cycle is near 1.
FACTORS = (1.25, -0.75, 1.125, 0.9375, -1.0)
DTYPES = ["float32", "bfloat16", "float16"]
# Of the gradients, the share that is compared on the host in one iteration; which ones changes from iteration to iteration.
ON_HOST = 8
NOTHING = contextlib.nullcontext()


def make_model(count: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> nn.Sequential:
    """Blocks of both kinds in turn, with random weights: (batch, length, hidden) to the same shape."""

    def one(index: int) -> nn.Module:
        if index % 2 == 0:
            return Block(shape)
        return nn.TransformerEncoderLayer(
            shape.hidden, shape.heads, shape.feed_forward, dropout=0.0, batch_first=True, norm_first=True
        )

    model = nn.Sequential(*(one(index).to(device, dtype) for index in range(count)))
    fill_normal(model, seed=0)
    return model


def run(
    model: nn.Module, x: torch.Tensor, grad_output: torch.Tensor, region: AbstractContextManager = NOTHING
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward: the output and the gradient of the input. The parameters' are replaced."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with region:
        output = model(x)
    output.backward(grad_output)
    return output.detach(), x.grad


def repeats_itself(model: nn.Module, x: torch.Tensor, grad_output: torch.Tensor) -> bool:
    """Whether two runs give the same bits, without which nothing could be compared with the model."""
    first = [*run(model, x, grad_output), *gradients(model)]
    second = [*run(model, x, grad_output), *gradients(model)]
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def differences(
    number: int,
    model: nn.Module,
    truth: nn.Module,
    x: torch.Tensor,
    grad_output: torch.Tensor,
    region: AbstractContextManager,
) -> list[str]:
    """Runs forward and backward of both models, the first one's forward within the region, and names what differs."""
    expected, expected_grad_x = run(truth, x, grad_output)
    output, grad_x = run(model, x, grad_output, region)
    found = []
    names = [name for name, _ in model.named_parameters()]
    pairs = list(zip(names, gradients(model), gradients(truth), strict=True))
    # The first gradients in this order are the last that backward made, whose copies home are under way.
    for name, gradient, expected_gradient in pairs[number % ON_HOST :: ON_HOST]:
        if not torch.equal(gradient.cpu(), expected_gradient.cpu()):
            found.append(f"gradient of {name}, read on the host")
    for name, gradient, expected_gradient in pairs:
        if not equal(gradient, expected_gradient):
            found.append(f"gradient of {name}")
    if not equal(output, expected):
        found.append("output")
    if not equal(grad_x, expected_grad_x):
        found.append("gradient of the input")
    if not all(bool(gradient.any()) and bool(gradient.isfinite().all()) for _, _, gradient in pairs):
        found.append("the truth itself, which has zero or non-finite gradients")
    return found


def saved_region(mode: str | None) -> AbstractContextManager:
    if mode is None:
        return NOTHING
    if mode == "everything":
        return torch_offload.saved_tensors(min_bytes=0)
    most = {} if mode == "automatic" else {"max_gpu_bytes": int(float(mode) * 2**30)}
    return torch_offload.saved_tensors(share="auto", min_bytes=0, **most)


def change(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def check(dtype: torch.dtype, tiny: bool, iterations: int, device: torch.device, region: AbstractContextManager) -> int:
    """Runs all iterations for one dtype; how many of them differ."""
    count, shape, tokens = (4, Shape(64, 128, 4, 2), 32) if tiny else (24, Shape(2048, 8192, 16, 8), 1024)
    truth = make_model(count, shape, dtype, device)
    model = copied_to(truth, "offload")
    x, grad_output = (make_input(tokens, shape, dtype, device, seed) for seed in (1, 2))
    if not repeats_itself(truth, x, grad_output):
        raise SystemExit(f"{dtype}: two runs on {device} alone differ; there is no truth to compare with.")
    begin, wrong = time.monotonic(), 0
    for number in range(iterations):
        found = differences(number, model, truth, x, grad_output, region)
        if found:
            wrong += 1
            print(f"{dtype}, iteration {number}: {len(found)} differ: {', '.join(found[:6])}", flush=True)
        factor = FACTORS[number % len(FACTORS)]
        change(model, factor)
        change(truth, factor)
        if number % 10 == 9 or number == iterations - 1:
            taken = time.monotonic() - begin
            print(f"{dtype}: {number + 1} iterations, {wrong} of them wrong, {taken:.1f} s", flush=True)
    if not all(equal(mine, true) for mine, true in zip(model.parameters(), truth.parameters(), strict=True)):
        wrong += 1
        print(f"{dtype}: weights differ at the end", flush=True)
    return wrong


def main() -> None:
    options = arguments(__doc__)
    options.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    options.add_argument("--iterations", type=int, help="for each dtype (default: 50; tiny: 3)")
    options.add_argument(
        "--delay", type=int, nargs="?", const=500, default=0, metavar="US", help="microseconds (default: %(const)s)"
    )
    options.add_argument("--poison", action="store_true", help="poison free memory, and evict at once")
    options.add_argument(
        "--saved",
        nargs="?",
        const="everything",
        metavar="GIB",
        help="what is saved for backward goes to the host: all of it, 'automatic', or what keeps the rest to so many GiB",
    )
    options = options.parse_args()
    # Read at the first use of the device and of cuBLAS.
    if options.delay:
        os.environ["TORCH_OFFLOAD_COPY_DELAY_US"] = str(options.delay)
    if options.poison:
        os.environ |= {"TORCH_OFFLOAD_POISON": "1", "TORCH_OFFLOAD_EVICT": "1"}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    device = compute_device(options.tiny)
    torch_offload.set_budget(0)
    iterations = options.iterations or (3 if options.tiny else 50)
    region = saved_region(options.saved)
    wrong = {}
    for dtype in (getattr(torch, name) for name in options.dtypes):
        wrong[str(dtype)] = check(dtype, options.tiny, iterations, device, region)
        torch_offload.empty_cache()
    record = {"iterations": iterations, "delay_us": options.delay, "poison": options.poison, "saved": options.saved}
    write_record("exactness", record | {"wrong": wrong, "stats": torch_offload.memory_stats()})
    if any(wrong.values()):
        raise SystemExit(f"not equal: {wrong}")
    print("equal: output, gradient of the input and every parameter's gradient, bit for bit", flush=True)


if __name__ == "__main__":
    main()
