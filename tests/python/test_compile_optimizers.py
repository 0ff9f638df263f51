"""Compiled steps of optimizers over offload parameters: one graph, and the plain device's values."""

import copy
import inspect

import pytest
import torch
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, GPU, OFFLOAD, assert_same, data, layers, values
from torch._dynamo.testing import CompileCounterWithBackend

KINDS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, foreach=False),
}

OTHERS = {
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9, centered=True, foreach=False),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, foreach=False),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01, foreach=False),
}


def stepped(kind, device, compile_step):
    """Three steps with the same gradients on every device: parameters and state behind them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = layers(2)
    gradients = [[data(*p.shape, seed=7 + k) for p in model.parameters()] for k in range(3)]
    trained = copy.deepcopy(model).to(device)
    optimizer = kind(trained.parameters())
    step = compile_step(optimizer)
    for given in gradients:
        for parameter, gradient in zip(trained.parameters(), given, strict=True):
            parameter.grad = gradient.to(device)
        step()
    state = optimizer.state_dict()["state"]
    for each in state.values():
        for value in each.values():
            assert value.dim() == 0 or value.device.type == device.type
    return values(trained), state


def assert_same_steps(kind, actual, expected):
    """On CUDA, PyTorch has the compiled Adam compute with its step counts as tensors there, which rounds differently."""
    if GPU and kind is not KINDS["SGD"]:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, check_device=False)
    else:
        assert_same(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_in_one_graph(kind, backend):
    """PyTorch breaks the graph around every step on purpose, so what is compiled is the step inside of its wrappers. The first
    step of offload parameters puts ours around PyTorch's loops, those of the plain device too."""
    stepped(kind, OFFLOAD, lambda optimizer: optimizer.step)

    def compile_step(optimizer):
        step = compiled(inspect.unwrap(type(optimizer).step), backend)
        return torch.no_grad()(lambda: step(optimizer))

    assert_same_steps(kind, stepped(kind, OFFLOAD, compile_step), stepped(kind, COMPUTE, compile_step))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_as_users_compile_it(kind, backend):
    """The wrapper around it adds no graph."""

    def run(device):
        counter = CompileCounterWithBackend(backend)
        result = stepped(kind, device, lambda optimizer: torch.compile(optimizer.step, backend=counter))
        return result, counter.frame_count

    (result, graphs), (expected, expected_graphs) = run(OFFLOAD), run(COMPUTE)
    assert_same_steps(kind, result, expected)
    assert graphs == expected_graphs


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_a_step_of_another_optimizer(kind):
    def run(device):
        return stepped(kind, device, lambda optimizer: torch.compile(optimizer.step, backend="aot_eager"))

    assert_same_steps(kind, run(OFFLOAD), run(COMPUTE))
