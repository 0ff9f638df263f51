"""What the tests of saved tensors share: a region that takes all, what it moves and holds, and the same program without it."""

import contextlib
import gc

import pytest
import torch
from helpers import CACHED, COMPUTE, OFFLOAD, assert_same, deterministic

import torch_offload
from torch_offload import saved_tensors

cached = pytest.mark.skipif(not CACHED, reason="tensors are in host memory already")
PLACES = [COMPUTE, OFFLOAD]


def everything(**options):
    return saved_tensors(min_bytes=0, **options)


def stats(name):
    return torch_offload.memory_stats()[name]


def sent_home():
    return stats("link.bytes_to_host")


def held():
    gc.collect()
    return stats("host.activation_bytes.current")


def both_ways(run, region=everything, empty=True):
    """The same with and without the region, the cache emptied before backward, on either device."""
    for device in PLACES:
        with deterministic():
            torch.manual_seed(0)
            expected = run(device, contextlib.nullcontext, lambda: None)
            torch.manual_seed(0)
            actual = run(device, region, torch_offload.empty_cache if empty else lambda: None)
        assert_same(actual, expected, str(device))
