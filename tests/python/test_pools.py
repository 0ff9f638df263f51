"""What the cache takes while PyTorch's allocator serves a thread from a pool."""

import threading
from types import SimpleNamespace

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, assert_same, at, data

from torch_offload import _pools

BEGIN, END = _pools._BEGIN, _pools._END


@pytest.fixture
def followed(monkeypatch):
    """Two modules with the allocator's functions, and what was told."""
    told, calls = [], []
    functions = {name: lambda device, pool, name=name: calls.append((name, device, pool)) for name in (BEGIN, END)}
    modules = [SimpleNamespace(**functions), SimpleNamespace(**functions)]
    monkeypatch.setattr(_pools, "_C", SimpleNamespace(set_thread_has_pool=told.append))
    _pools.follow(modules)
    return SimpleNamespace(modules=modules, told=told, calls=calls)


def test_pools_of_a_thread_are_followed(followed):
    one, other = followed.modules
    getattr(one, BEGIN)(0, (0, 1))
    getattr(other, BEGIN)(0, (0, 2))
    getattr(one, END)(0, (0, 2))
    assert followed.told == [True, True, True]
    getattr(other, END)(0, (0, 1))
    assert followed.told[-1] is False
    assert [name for name, *_ in followed.calls] == [BEGIN, BEGIN, END, END]


def test_a_pool_of_all_threads_changes_nothing(followed):
    getattr(followed.modules[0], END)(0, (0, 1))
    assert followed.told == []


def test_threads_are_told_apart(followed):
    module = followed.modules[0]
    getattr(module, BEGIN)(0, (0, 1))
    thread = threading.Thread(target=getattr(module, END), args=(0, (0, 1)))
    thread.start()
    thread.join()
    assert followed.told == [True]
    getattr(module, END)(0, (0, 1))
    assert followed.told == [True, False]


@pytest.mark.gpu
def test_the_cache_is_in_no_pool():
    weights = [at(OFFLOAD, 512, 512, seed=k) for k in range(4)]
    x = data(512, 512)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        results = [x * weight for weight in weights]
    assert sum(segment["allocated_size"] for segment in pool.snapshot()) == len(results) << 20
    expected = [x * weight.to(COMPUTE) for weight in weights]
    assert_same(results, expected)
    del results, pool
    assert_same([x * weight for weight in weights], expected)
