"""torch.compile with CUDA graphs: PyTorch captures what is between the fetches, and leaves these out."""

import copy

import pytest
import torch
from compiling import fresh_compiler  # noqa: F401 - a fixture for all tests
from helpers import COMPUTE, OFFLOAD, assert_same, data, grads, layers
from torch._dynamo.utils import counters

import torch_offload

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def budget_as_it_was():
    yield
    torch_offload.set_budget("auto")


def graphed(model):
    step = torch.compile(model, fullgraph=True, mode="reduce-overhead")

    def run(x):
        torch.compiler.cudagraph_mark_step_begin()
        return step(x)

    return run


@pytest.mark.parametrize("budget", ["auto", 0])
def test_inference(budget):
    torch_offload.set_budget(budget)
    torch.manual_seed(0)
    plain = layers(6, 32).to(COMPUTE)
    model = copy.deepcopy(plain).to(OFFLOAD)
    step, expected = graphed(model), torch.compile(plain, fullgraph=True)
    with torch.no_grad():
        for k in range(4):  # the third is a replay
            assert_same(step(data(3, 32, seed=k)).clone(), expected(data(3, 32, seed=k)))
        assert counters["inductor"]["cudagraph_partitions"] > 0
        for changed in (plain, model):
            changed.load_state_dict({name: 2 * value for name, value in changed.state_dict().items()})
        assert_same(step(data(3, 32)).clone(), expected(data(3, 32)))


def test_training():
    torch.manual_seed(0)
    plain = layers(6, 32)
    found = []
    for device in (COMPUTE, OFFLOAD):
        torch.compiler.reset()
        model = copy.deepcopy(plain).to(device)
        step = graphed(model)
        gradients = []
        for k in range(4):
            model.zero_grad()
            step(data(3, 32, seed=k)).square().mean().backward()
            gradients.append({name: gradient.cpu() for name, gradient in grads(model).items()})
        found.append(gradients)
    assert_same(found[1], found[0])
