"""Models of other libraries; a file of tests is skipped where its library isn't installed. Nothing is ever downloaded."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """On the CPU too: there index_put_ adds up what has the same index in the order that its threads happen to have."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
