"""What every test shares: tests marked ``gpu`` are skipped where there is none; which of those that compile are ``extra``."""

from collections.abc import Iterator

import pytest
import torch
from helpers import HOST, pending_jobs
from sim_runs import WITHOUT_A_LINK

import torch_offload


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HOST:
        for item in items:
            if runs_over_the_link(item.nodeid.split("/")[-1]):
                item.add_marker(pytest.mark.extra)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def runs_over_the_link(name: str) -> bool:
    """Whether CI runs a test that compiles, ``file::function[parameters]``, over the simulated link."""
    left_out = [entry.split("/")[-1] for entry in WITHOUT_A_LINK if entry.startswith("--deselect=")]
    return name.split("::")[0] in WITHOUT_A_LINK and not name.startswith(tuple(left_out))


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
