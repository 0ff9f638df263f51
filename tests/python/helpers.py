"""What the tests of the offload device share: values, layers, and the same program on the plain device, compared bit by bit."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_offload

GPU = torch.cuda.is_available()
SIM = os.environ.get("TORCH_OFFLOAD_LINK") == "sim"
HOST = not GPU and not SIM
CACHED = not HOST  # fetches go through a cache
# On the simulated link a job of the host is done when somebody waits for it, or asks for all.
LATE = SIM and os.environ.get("TORCH_OFFLOAD_HOST_JOBS", "wanted") == "wanted"

OFFLOAD = torch.device("offload")
CPU = torch.device("cpu")
COMPUTE = torch.device("cuda", 0) if GPU else CPU

LOW = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *LOW)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the values, in row-major order, on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_same(actual: Any, expected: Any, where: str = "result") -> None:
    """The same structure, dtypes, shapes and bits; devices may differ."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where}: {type(actual)} and not a tensor"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} and not {expected.dtype}"
        assert actual.shape == expected.shape, f"{where}: {tuple(actual.shape)} and not {tuple(expected.shape)}"
        if not torch.equal(bits(actual), bits(expected)):
            raise AssertionError(f"{where} differs:\n{actual.detach().cpu()}\nand not\n{expected.detach().cpu()}")
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for k, value in enumerate(expected):
            assert_same(actual[k], value, f"{where}[{k}]")
    else:
        assert actual == expected, f"{where}: {actual} and not {expected}"


def pending_jobs() -> int:
    """How many jobs of the host are not done yet."""
    return torch_offload.memory_stats().get("host_jobs.pending", 0)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels whose results are the same bits every time, where there is a choice."""
    if not GPU:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.deterministic = False


def same(run: Callable[[torch.device], Any], seed: int = 0, truth: torch.device = COMPUTE) -> Any:
    """Runs ``run(device)`` on the plain device and on offload; all that it returns must be the same bits.

    Returns:
        What the run on offload returned.
    """
    with deterministic():
        torch.manual_seed(seed)
        expected = run(truth)
        torch.manual_seed(seed)
        actual = run(OFFLOAD)
    assert_same(actual, expected)
    return actual


def says(kind: type[Exception] | tuple[type[Exception], ...], sentence: str, function: Callable[[], Any]) -> None:
    """The error is the sentence and nothing else. Nobody keeps it: a kept error keeps the frames that it went through, and
    PyTorch's printing turns functorch off for as long as its frame lives."""
    with pytest.raises(kind, match=rf"\A{re.escape(sentence)}\Z"):
        function()


def at(device: torch.device | str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype, device="cpu").to(device)


def data(*shape: int, device: torch.device = COMPUTE, seed: int = 7) -> torch.Tensor:
    """Values to feed a model with, where its activations are."""
    return at(device, *shape, seed=seed)


def layers(count: int = 4, width: int = 8) -> torch.nn.Sequential:
    """Linear layers, each with a GELU behind it."""
    return torch.nn.Sequential(*[m for _ in range(count) for m in (torch.nn.Linear(width, width), torch.nn.GELU())])


class Scaled(torch.autograd.Function):
    """``x * weight``, as somebody writes it who knows nothing of offload."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Tied(torch.nn.Module):
    """A language model whose head has the embedding's weight; with a buffer or two in `norm`."""

    def __init__(self, words: int = 7, width: int = 4, norm: bool = False):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = torch.nn.BatchNorm1d(words) if norm else torch.nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head(self.embedding(tokens).tanh()))


def grads(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Every parameter's gradient, which must be where the parameter is."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.device == parameter.device, name
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def python(program: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def passes(program: str, timeout: float = 300, **environment: str) -> str:
    """What a program prints that must succeed, and say nothing on its error output."""
    done = python(program, timeout, **environment)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
