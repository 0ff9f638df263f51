"""What the tests of lookups share: a table of 4 MiB, and what is read of it where it is."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import COMPUTE, at

import torch_offload

ROWS, WIDTH = 16_384, 64
TABLE = ROWS * WIDTH * 4


@pytest.fixture(autouse=True)
def nothing_fits() -> Iterator[None]:
    """For a module that imports it."""
    torch_offload.empty_cache()
    torch_offload.set_budget(0)
    yield
    torch_offload.set_budget("auto")


def table(device: torch.device, seed: int = 0, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return at(device, rows, WIDTH, seed=seed, dtype=dtype)


def index(*shape: int, seed: int = 1, device: torch.device = COMPUTE, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(rows, shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)


def read(action: Callable[[], Any]) -> tuple[int, ...]:
    """How many lookups of ``action()`` read in place, how many bytes, and how many bytes were copied to the device."""
    torch_offload.synchronize()
    names = ("cache.reads_in_place", "link.bytes_read_in_place", "link.bytes_to_device")
    before = torch_offload.memory_stats()
    action()
    torch_offload.synchronize()
    after = torch_offload.memory_stats()
    return tuple(after[name] - before[name] for name in names)
