"""What an exception or an interrupt leaves behind: no scope of a step, however long somebody keeps the traceback."""

import copy

import pytest
import torch
from helpers import CACHED, OFFLOAD, at, passes

import torch_offload


def computes_on_host() -> bool:
    """Whether a new value of offload tensors is made on the host now."""
    w = at(OFFLOAD, 8, 8)
    before = torch_offload.memory_stats()["cache.fetches"]
    w @ w
    return torch_offload.memory_stats()["cache.fetches"] == before


@pytest.mark.skipif(not CACHED, reason="there is nowhere else to compute")
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_raises_ends_its_scope_though_the_error_is_kept(make):
    net = torch.nn.Linear(8, 8).to(OFFLOAD)
    optimizer = make(net.parameters(), lr=0.1)
    kept = []
    for _ in range(3):
        try:
            optimizer.step(lambda: 1 / 0)
        except ZeroDivisionError as error:
            kept.append(error)  # with its traceback, whose frames live on
        assert not computes_on_host()
    with torch_offload.on_host():
        assert computes_on_host()
    assert not computes_on_host()


@pytest.mark.skipif(not CACHED, reason="there is nowhere else to compute")
def test_a_subclass_that_steps_by_its_parent():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            super().step()
            assert computes_on_host()

    net = torch.nn.Linear(8, 8).to(OFFLOAD)
    plain = copy.deepcopy(net).to("cpu")
    for each in (net, plain):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
    Twice(net.parameters(), lr=0.5).step()
    plain_step = torch.optim.SGD(plain.parameters(), lr=0.5)
    plain_step.step()
    plain_step.step()
    assert torch.equal(net.weight.cpu(), plain.weight)
    assert not computes_on_host()


@torch_offload.on_host()
def hosted():
    return computes_on_host()


@pytest.mark.skipif(not CACHED, reason="there is nowhere else to compute")
def test_the_scope_as_a_decorator_and_nested():
    scope = torch_offload.on_host()
    with scope, scope, torch_offload.on_host():
        assert computes_on_host()
    assert hosted()
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert not computes_on_host()


def test_optimizers_made_before_the_import_step_on_the_host():
    passes(
        """
        import torch
        net = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        import torch_offload
        net.to("offload")
        net.weight.grad = torch.ones(8, 8, device="offload")
        before = net.weight.detach().cpu().clone()
        fetches = torch_offload.memory_stats()["cache.fetches"]
        optimizer.step()
        assert torch_offload.memory_stats()["cache.fetches"] == fetches
        assert torch.equal(net.weight.cpu(), before - 0.5)
        """
    )
