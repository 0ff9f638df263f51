"""What every test shares: tests marked ``gpu`` are skipped where there is none."""

from collections.abc import Iterator

import pytest
import torch
from helpers import pending_jobs

import torch_offload


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No test before has left the host anything to do, and this one leaves nothing that is never done."""
    torch_offload.synchronize()
    yield
    torch_offload.synchronize()
    assert pending_jobs() == 0


@pytest.fixture
def room():
    """All that the tests of a file make has room in the cache, and nothing is there before."""
    torch_offload.set_budget(2**24)
    torch_offload.empty_cache()
    yield
    torch_offload.set_budget("auto")
