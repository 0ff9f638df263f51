"""What an exception or an interrupt leaves behind: no scope of a step, however long somebody keeps the traceback. And what
scopes do as decorators."""

import copy
import functools

import pytest
import torch
from helpers import CACHED, OFFLOAD, at, passes, says

import torch_offload
from torch_offload import _C


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


@torch_offload.on_host
def hosted_without_parentheses():
    """What is said of it."""
    return _C.HostScope.active()


def test_the_scope_as_a_decorator_without_parentheses():
    assert hosted_without_parentheses()
    assert hosted_without_parentheses.__doc__ == "What is said of it."
    assert not _C.HostScope.active()
    assert isinstance(torch_offload.on_host(), torch_offload.on_host)


@torch_offload.on_host()
def numbered(count):
    """Whether the scope is active, at each step; it is sent what to add, and returns the sum."""
    total = 0
    try:
        for _ in range(count):
            total += (yield _C.HostScope.active()) or 0
    except KeyError:
        yield _C.HostScope.active()
    finally:
        closed.append(_C.HostScope.active())
    return total


closed = []


def test_a_generator_is_in_the_scope_while_it_runs():
    closed.clear()
    running = numbered(3)
    assert not _C.HostScope.active()
    assert next(running)
    assert not _C.HostScope.active()
    assert running.send(2)
    assert running.send(3)
    with pytest.raises(StopIteration) as returned:
        running.send(4)
    assert returned.value.value == 9
    assert closed == [True]
    assert not _C.HostScope.active()


def test_a_generator_that_is_thrown_at_or_closed_is_in_the_scope():
    closed.clear()
    running = numbered(3)
    assert next(running)
    assert running.throw(KeyError("no"))
    assert not _C.HostScope.active()
    running.close()
    assert closed == [True]
    running = numbered(3)
    assert next(running)
    with pytest.raises(ZeroDivisionError):
        running.throw(ZeroDivisionError)
    assert closed == [True, True]
    assert not _C.HostScope.active()


async def coroutine():
    return 1


async def asynchronous_generator():
    yield 1


SCOPES = {
    "on_host": torch_offload.on_host,
    "saved_tensors": torch_offload.saved_tensors,
    "keep_saved_tensors": torch_offload.keep_saved_tensors,
    "device": lambda: torch.offload.device(0),
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("function", [coroutine, asynchronous_generator, functools.partial(coroutine)])
def test_async_functions_are_refused(scope, function):
    name = getattr(function, "__qualname__", function)
    sentence = (
        f"offload: {scope} can't decorate {name}, which is async: other tasks would run in the scope while it waits; write "
        "`with` inside of it, around what awaits nothing."
    )
    says(TypeError, sentence, lambda: SCOPES[scope]()(function))
    assert not _C.HostScope.active()


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
