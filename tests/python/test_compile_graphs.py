"""torch.compile with CUDA graphs: fetches are captured where all of a graph is, and left out where it falls into parts."""

import copy

import pytest
import torch
from compiling import fresh_compiler, graphed  # noqa: F401 - a fixture for all tests
from helpers import COMPUTE, OFFLOAD, assert_same, at, data, grads, layers

import torch_offload

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def budget_as_it_was():
    yield
    torch_offload.set_budget("auto")


@pytest.fixture
def replays(monkeypatch):
    """How many graphs were replayed since it was asked last: PyTorch says nothing where it has captured none."""
    replay, count = torch.cuda.CUDAGraph.replay, 0

    def counted(graph):
        nonlocal count
        count += 1
        replay(graph)

    def since():
        nonlocal count
        found, count = count, 0
        return found

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return since


@torch.no_grad()
@pytest.mark.parametrize("budget", ["auto", 0])
def test_inference(budget, replays):
    torch_offload.set_budget(budget)
    torch.manual_seed(0)
    plain = layers(6, 32).to(COMPUTE)
    model = copy.deepcopy(plain).to(OFFLOAD)
    step, expected = graphed(model), torch.compile(plain, fullgraph=True)
    for k in range(6):  # the third is the first replay
        x = data(3, 32, seed=k)
        before = torch_offload.stats()["fetches"]
        assert_same(step(x).clone(), expected(x))
        assert replays() > 0 or k < 3
        assert k < 3 or torch_offload.stats()["fetches"] == before, "a replay asks no cache"
        for changed in (plain, model):
            for parameter in changed.parameters():
                parameter.copy_(parameter.cpu() * 0.9)
    for changed in (plain, model):
        changed.load_state_dict({name: 2 * value for name, value in changed.state_dict().items()})
    assert_same(step(data(3, 32)).clone(), expected(data(3, 32)))
    assert replays() > 0


class Returning(torch.nn.Module):
    """Returns what it has fetched, and computes with it."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return torch.ops.offload.fetch(self.weight, x.device), torch.relu(x @ self.weight)


@torch.no_grad()
def test_a_fetched_tensor_that_is_returned(replays):
    """It is a copy, and the graph's."""
    weight = data(32, 32)
    step = graphed(Returning(weight.to(OFFLOAD)))
    for k in range(4):
        x = data(3, 32, seed=k)
        before = torch_offload.stats()["fetches"]
        found, product = step(x)
        assert_same(found.clone(), weight)
        assert_same(product.clone(), torch.relu(x @ weight))
        assert replays() > 0 or k < 3
        assert k < 3 or torch_offload.stats()["fetches"] == before


@torch.no_grad()
@pytest.mark.parametrize("argument", [False, True], ids=["closure", "argument"])
def test_a_tensor_that_is_no_parameter(argument, replays):
    """It may be another one at each call: its fetch, and with it all others, is left out."""
    layer = torch.nn.Linear(32, 32).to(OFFLOAD)
    one = at(OFFLOAD, 32, 32)

    def both(x, weight=one):
        return torch.relu(layer(x) @ weight)

    step = torch.compile(both, fullgraph=True, mode="reduce-overhead")
    for k in range(6):
        x, weight = data(3, 32, seed=k), at(OFFLOAD, 32, 32, seed=k) if argument else one
        torch.compiler.cudagraph_mark_step_begin()
        found = step(x, weight) if argument else step(x)
        assert_same(found.clone(), both(x, weight))
        assert replays() > 0 or k < 3  # of what is behind the fetches


def test_training_over_frozen_weights(replays):
    """The backward, too, is one graph with its own fetches."""
    torch.manual_seed(0)
    plain = layers(4, 32).requires_grad_(False)
    found = []
    for device in (COMPUTE, OFFLOAD):
        torch.compiler.reset()
        model = copy.deepcopy(plain).to(device)
        scale = torch.ones(32, device=COMPUTE, requires_grad=True)
        step = graphed(lambda x, model=model, scale=scale: model(x * scale))
        gradients = []
        for k in range(5):
            scale.grad = None
            before = torch_offload.stats()["fetches"]
            step(data(3, 32, seed=k)).square().mean().backward()
            assert replays() > 1 or k < 3
            assert k < 3 or torch_offload.stats()["fetches"] == before, "a replay asks no cache"
            gradients.append(scale.grad.clone())
        found.append(gradients)
    assert_same(found[1], found[0])


def test_training_with_new_weights(replays):
    """Writes in place and `load_state_dict` between steps: a replay computes with the values of its time."""
    torch.manual_seed(0)
    plain = layers(4, 32)
    found = []
    for device in (COMPUTE, OFFLOAD):
        torch.compiler.reset()
        model = copy.deepcopy(plain).to(device)
        step, outputs = graphed(model), []
        for k in range(9):
            model.zero_grad()
            y = step(data(3, 32, seed=k % 3))
            y.square().mean().backward()
            assert replays() > 1 or k < 3
            outputs.append((y.detach().cpu(), {name: gradient.cpu() for name, gradient in grads(model).items()}))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.cpu() - 0.5 * parameter.grad.cpu())  # the bits of the host, on both
            if k % 4 == 3:
                model.load_state_dict({name: value.cpu() * 1.5 for name, value in model.state_dict().items()})
        found.append(outputs)
    assert_same(found[1], found[0])
