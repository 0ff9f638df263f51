"""What names a device: indices, contexts, and what is none."""

import threading

import numpy
import pytest
import torch
from helpers import OFFLOAD, says


@pytest.mark.parametrize(
    "of",
    [
        lambda: torch.ones(1, device=OFFLOAD),
        lambda: torch.ones(1, device=OFFLOAD).untyped_storage(),
        lambda: torch.ones(1),
    ],
    ids=["tensor", "storage", "cpu"],
)
def test_device_of(of):
    with torch.offload.device_of(of()):
        assert torch.offload.current_device() == 0
        assert torch.ones(1, device="offload").device.index == 0


def test_device_context():
    with torch.offload.device(0):
        assert torch.offload.current_device() == 0
    with torch.offload.device("offload:0"):
        assert torch.ones(1, device="offload").device.index == 0
    torch.offload.set_device(0)
    torch.offload.set_device("offload:0")


@pytest.mark.parametrize("index", [-1, -7, None])
def test_what_changes_no_device(index):
    torch.offload.set_device(index)
    with torch.offload.device(index):
        assert torch.offload.current_device() == 0
        assert torch.ones(1, device="offload").device == torch.device("offload:0")
    with pytest.raises(ValueError, match="no device offload:-1"):
        torch.offload.memory_stats(-1)


@pytest.mark.parametrize("index", [0, numpy.int64(0)])
def test_what_is_an_index(index):
    torch.offload.set_device(index)
    assert torch.offload.get_device_name(index) == torch.offload.get_device_name()


@pytest.mark.parametrize("device", [1.5, []])
def test_what_is_no_index(device):
    sentence = f"expected an offload device or an index and got {device!r}."
    for attempt in (torch.offload.set_device, torch.offload.device, torch.offload.memory_stats, torch.offload.Stream):
        says(TypeError, sentence, lambda attempt=attempt: attempt(device))


@pytest.mark.parametrize("index", [99, 7])
def test_an_index_that_there_is_not(index):
    here = torch.offload.device_count()
    attempts = [
        lambda: torch.ones(2, device=f"offload:{index}"),
        lambda: torch.ones(2).to(f"offload:{index}"),
        lambda: torch.ones(2, device=OFFLOAD).to(f"offload:{index}"),
        lambda: torch.nn.Linear(2, 2).to(torch.device("offload", index)),
        lambda: torch.offload.set_device(index),
        lambda: torch.offload.memory_stats(index),
        lambda: torch.empty_strided((2,), (1,), device=f"offload:{index}"),
        lambda: torch.ones(2).new_zeros(2, device=f"offload:{index}"),
    ]
    for attempt in attempts:
        with pytest.raises((RuntimeError, ValueError), match=f"no device offload:{index}.*has {here}"):
            attempt()
    assert torch.ones(2, device=OFFLOAD).sum().item() == 2


def test_wrong_kinds_of_device():
    for attempt in (lambda: torch.offload.set_device("cpu"), lambda: torch.offload.device("cuda:0")):
        with pytest.raises(ValueError, match="expected an offload device"):
            attempt()


def test_threads_have_their_own_current_device():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.offload.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]
