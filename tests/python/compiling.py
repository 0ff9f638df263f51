"""What the tests of torch.compile share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import deterministic

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """For a module that imports it. Inductor's choices are not left to timing."""
    torch.compiler.reset()
    with deterministic():
        yield
    torch.compiler.reset()


def compiled(function: Callable, backend: str, **options: Any) -> Callable:
    """With no graph breaks."""
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def graphed(function: Callable) -> Callable:
    """A function of one operand, compiled with CUDA graphs, each call of which is a step."""
    step = torch.compile(function, fullgraph=True, mode="reduce-overhead")

    def run(x: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step(x)

    return run
