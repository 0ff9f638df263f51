"""The names of ``torch.offload``: what PyTorch's own code looks for there, and people who know ``torch.cuda``."""

import importlib

import pytest
import torch

import torch_offload  # noqa: F401 - makes the device

# What PyTorch's own code takes from the module of whatever device it is given: random numbers, checkpoints, autocast,
# profilers, the accelerator, torch.distributed (streams, its memory tracker) and torch.testing.
ASKED_FOR = [
    "Event", "Stream", "current_device", "current_stream", "default_generators", "device", "device_count",
    "empty_cache", "get_amp_supported_dtype", "get_rng_state", "init", "is_available", "is_initialized", "manual_seed",
    "manual_seed_all", "max_memory_allocated", "memory_allocated", "memory_reserved", "memory_stats", "memory_summary",
    "reset_peak_memory_stats", "set_device", "set_rng_state", "set_stream", "stream", "synchronize", "_is_in_bad_fork",
    "_lazy_init",
]  # fmt: skip

# What torch.cuda.memory has beside, that is deprecated, of the CUDA allocator, or said by another name.
NOT_OF_OFFLOAD = [
    "CUDAPluggableAllocator", "MemPool", "caching_allocator_alloc", "caching_allocator_delete",
    "caching_allocator_disabled", "caching_allocator_enable", "change_current_allocator", "get_allocator_backend",
    "list_gpu_processes", "use_mem_pool", "memory_cached", "max_memory_cached", "reset_max_memory_allocated",
    "reset_max_memory_cached", "host_memory_stats", "host_memory_stats_as_nested_dict",
    "reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats", "get_per_process_memory_fraction",
    "set_per_process_memory_fraction",
]  # fmt: skip


def test_every_public_name_is_there_and_says_what_it_is():
    for name in torch.offload.__all__:
        value = getattr(torch.offload, name)
        assert name == "default_generators" or value.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = torch.offload.nothing


def test_what_generic_code_asks_for_is_there():
    assert [name for name in ASKED_FOR if not hasattr(torch.offload, name)] == []


@pytest.mark.parametrize("name", ["memory", "random"])
def test_submodules_are_named_as_those_of_cuda(name):
    part, cudas = getattr(torch.offload, name), getattr(torch.cuda, name)
    assert importlib.import_module(f"torch.offload.{name}") is part
    assert set(part.__all__) == set(cudas.__all__) - set(NOT_OF_OFFLOAD)
    for function in part.__all__:
        assert getattr(torch.offload, function) is getattr(part, function)
        assert function in torch.offload.__all__
