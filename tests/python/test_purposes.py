"""Host bytes by purpose: parameters, gradients, optimizer state, activations, and what is temporary."""

import copy
import gc
import io
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from helpers import data, layers
from torch import nn

import torch_offload

PURPOSES = ("parameter", "gradient", "optimizer", "activation", "temporary")


def count(purpose: str, what: str = "bytes", when: str = "current") -> int:
    return torch.offload.memory_stats()[f"host.{purpose}_{what}.{when}"]


def assert_sum() -> None:
    stats = torch.offload.memory_stats()
    for what in ("bytes", "count"):
        parts = {purpose: stats[f"host.{purpose}_{what}.current"] for purpose in PURPOSES}
        assert sum(parts.values()) == stats[f"host.allocated_{what}.current"], parts
        for purpose in PURPOSES:
            assert parts[purpose] <= stats[f"host.{purpose}_{what}.peak"] <= stats[f"host.allocated_{what}.peak"]


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of offload tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_offload}
    return sum(storages.values())


@pytest.fixture
def added() -> Iterator[Callable[[str], int]]:
    """How many bytes of a purpose the test has added."""
    torch_offload.synchronize()  # what tests before it have left to be done holds gradients
    gc.collect()
    torch.offload.reset_peak_memory_stats()
    before = {purpose: count(purpose) for purpose in PURPOSES}
    yield lambda purpose: count(purpose) - before[purpose]
    assert_sum()


def test_a_training_run(added):
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8)).to("offload")
    model[3].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = held([*model.parameters(), *model.buffers()])
    assert added("parameter") == weights
    for _ in range(3):
        torch_offload.synchronize()  # a step that isn't done holds its gradients
        optimizer.zero_grad()
        assert added("gradient") == 0
        loss = model(data(4, 16)).square().sum()
        assert_sum()
        loss.backward()
        assert added("gradient") == held(p.grad for p in model.parameters() if p.grad is not None) > 0
        assert_sum()
        optimizer.step()
        state = held(v for entry in optimizer.state.values() for v in entry.values())
        assert added("optimizer") == state > 0
        assert added("parameter") == weights
        assert_sum()
    torch_offload.synchronize()
    del loss, optimizer
    gc.collect()
    assert added("optimizer") == 0
    assert count("optimizer", when="peak") >= state
    model.to("cpu")
    assert added("parameter") == 0
    del model
    gc.collect()
    assert [added(purpose) for purpose in PURPOSES] == [0] * 5


def test_plain_inference_adds_parameters_alone(added):
    model = layers().to("offload").requires_grad_(False)
    with torch.inference_mode():
        for _ in range(2):
            model(data(4, 8))
            assert_sum()
    assert {purpose: added(purpose) for purpose in PURPOSES} == {
        "parameter": held(model.parameters()), "gradient": 0, "optimizer": 0, "activation": 0, "temporary": 0,
    }  # fmt: skip


def test_results_are_activations(added):
    model = layers().to("offload").requires_grad_(False)
    x = torch.randn(4, 8).to("offload")
    assert added("temporary") == held([x])
    result = model(x)
    assert result.is_offload
    assert added("activation") == held([result])
    del result
    assert added("activation") == 0
    assert count("activation", when="peak") > 0


def test_results_that_backward_needs_are_activations_and_their_gradients_are_not(added):
    weight = torch.randn(8, 8, device="offload", requires_grad=True)
    x = torch.randn(4, 8).to("offload")
    hidden = x @ weight
    loss = (hidden * hidden).sum()
    assert added("activation") >= held([hidden])
    hidden.retain_grad()
    loss.backward()
    assert added("gradient") == held([weight.grad, hidden.grad])
    assert added("parameter") == held([weight])


def test_a_leaf_that_requires_gradients_is_a_parameter_from_its_first_use_on(added):
    weight = torch.randn(64, 64, device="offload", requires_grad=True)
    assert added("temporary") == held([weight])
    data(2, 64) @ weight
    assert added("parameter") == held([weight])
    assert added("temporary") == 0
    assert count("temporary", when="peak") - count("temporary") >= held([weight])


def test_gradients_of_a_weight_that_is_used_twice_and_accumulated(added):
    weight = nn.Parameter(torch.randn(8, 8)).to("offload").detach().requires_grad_()
    for _ in range(2):
        x = data(4, 8)
        ((x @ weight) @ weight).sum().backward()
        assert added("gradient") == held([weight.grad])


def test_a_graph_of_the_backward(added):
    weight = torch.randn(8, 8, device="offload", requires_grad=True)
    (gradient,) = torch.autograd.grad((data(4, 8) @ weight).square().sum(), weight, create_graph=True)
    assert added("gradient") >= held([gradient])


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_anew_is_no_gradient(added, reentrant):
    model = layers(2).to("offload")
    seen = []
    model[0].register_forward_hook(lambda m, i, result: seen.append(result.detach()))
    x = torch.randn(4, 8).to("offload").requires_grad_()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert len(seen) == 2
    assert added("activation") >= held(seen)
    assert added("gradient") == held(p.grad for p in (*model.parameters(), x))


def make_in_place() -> nn.Module:
    with torch.device("offload"):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)


def assigned() -> nn.Module:
    model = nn.Linear(8, 8)
    state = {name: value.to("offload") for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


def unpickled() -> nn.Module:
    saved = io.BytesIO()
    torch.save(nn.Linear(8, 8).requires_grad_(False), saved)
    saved.seek(0)
    return torch.load(saved, map_location="offload", weights_only=False)


def deep_copied() -> nn.Module:
    return copy.deepcopy(nn.Linear(8, 8).to("offload").requires_grad_(False))


def emptied() -> nn.Module:
    return nn.LSTM(8, 8, device="meta").to_empty(device="offload").requires_grad_(False)


def halved() -> nn.Module:
    return nn.Linear(8, 8).to("offload").half()


@pytest.mark.parametrize("make", [make_in_place, assigned, unpickled, deep_copied, emptied, halved])
def test_modules_that_get_their_tensors_otherwise(added, make):
    model = make()
    gc.collect()
    assert added("parameter") == held([*model.parameters(), *model.buffers()]) > 0
    assert added("temporary") == 0


def test_a_subclass_is_what_is_inside(added):
    inner = torch.randn(16, device="offload")

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, value):
            return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)

        def __init__(self, value):
            self.value = value

        def __tensor_flatten__(self):
            return ["value"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.detach.default:
                return cls(args[0].value)
            raise NotImplementedError(function)

    module = nn.Module()
    module.register_buffer("packed", Wrapped(inner))
    assert added("parameter") == held([inner])


def test_state_that_is_loaded_or_nested_is_the_optimizers(added):
    weight = torch.randn(32, 32, device="offload", requires_grad=True)
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    ):
        optimizer = make([weight])

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = (data(4, 32) @ weight).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        state = [v for e in optimizer.state.values() for v in e.values()]
        tensors = [t for v in state for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor)]
        # What LBFGS keeps of gradients is no parameter's.
        assert held(tensors) > 0
        assert added("optimizer") + added("gradient") == held([*tensors, weight.grad])
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        loaded = make([weight])
        loaded.load_state_dict(torch.load(saved))
        loaded.step(closure)
        assert added("optimizer") > held(tensors) / 2
        del optimizer, loaded, closure, state, tensors
        gc.collect()


def test_what_a_step_makes_on_the_way_is_temporary(added):
    model = layers(2, 64).to("offload")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(data(4, 64)).sum().backward()
        torch.offload.reset_peak_memory_stats()
        optimizer.step()
    assert added("temporary") == 0
    assert count("temporary", when="peak") - count("temporary") > 0
    assert added("activation") == 0


def test_a_storage_that_grows_keeps_its_purpose(added):
    module = nn.Module()
    module.register_buffer("cache", torch.zeros(4, device="offload"))
    module.cache.resize_(1000)
    assert added("parameter") == held([module.cache]) == 4000
    assert added("temporary") == 0


def test_peaks_are_reset(added):
    torch.randn(1000, device="offload")
    assert count("temporary", when="peak") >= count("temporary") + 4000
    torch.offload.reset_peak_memory_stats()
    for purpose in PURPOSES:
        assert count(purpose, when="peak") == count(purpose)
        assert count(purpose, "count", "peak") == count(purpose, "count")
