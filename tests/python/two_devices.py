"""What the tests of two devices share."""

import os
from collections.abc import Iterator

import pytest
import torch
from helpers import HOST

import torch_offload

HOMES = [torch.device("offload", 0), torch.device("offload", 1)]
needs_two_devices = pytest.mark.skipif(HOST or torch.offload.device_count() < 2, reason="needs two devices")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """For a module that imports it."""
    yield
    torch_offload.set_budget(os.environ.get("TORCH_OFFLOAD_BUDGET") or "auto")
    torch_offload.empty_cache()
    assert torch.offload.current_device() == 0
