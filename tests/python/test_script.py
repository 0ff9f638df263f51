"""TorchScript: traced and scripted models on offload, and what of training them PyTorch's own optimizer of graphs prevents."""

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, at, data, grads, python, same
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def train(net, device, steps=4, fed_from=COMPUTE):
    net = net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        net(at(fed_from, 3, 4, seed=step)).square().sum().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()], grads(net)


def test_inference():
    def run(device):
        net = torch.jit.script(model()).to(device)
        with torch.no_grad():
            return [net(data(3, 4, seed=step)) for step in range(4)]

    same(run)


def test_training_a_trace():
    same(lambda device: train(torch.jit.trace(model(), torch.randn(3, 4)), device))


def test_training_on_offload_alone():
    same(lambda device: train(torch.jit.script(model()), device, fed_from=device))


def test_training_beside_activations_elsewhere():
    def run(device):
        with torch.jit.optimized_execution(False):
            return train(torch.jit.script(model()), device)

    same(run)


def test_pytorch_differentiates_a_script_by_itself():
    """From a later call on, by graphs of its own in which no operation of ours takes part."""
    program = """
        import torch
        import torch_offload

        net = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))).to("offload")
        for _ in range(4):
            net(torch.randn(3, 4)).sum().backward()
        """
    assert "returned an invalid gradient at index 0 - expected device offload:0" in python(program).stderr


@pytest.mark.parametrize("fed_from", [COMPUTE, OFFLOAD], ids=["plain", "offload"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)), (2, 1, 6, 6)),
        (lambda: nn.Conv1d(2, 4, 3), (2, 2, 6)),
        (lambda: nn.RNNCell(4, 8), (2, 4)),
    ],
    ids=["conv2d", "conv1d", "cell"],
)
def test_operations_that_are_traced_in_parts(build, shape, fed_from):
    """Convolutions and cells. The graph has their parameters, which may be written to, and the parts that it has elsewhere."""
    kinds = []

    def run(device):
        torch.manual_seed(0)
        net = build().to(device)
        x = data(*shape, device=COMPUTE if device == COMPUTE else fed_from)
        traced = torch.jit.trace(net, x)
        kinds.append([node.kind() for node in traced.inlined_graph.nodes() if node.kind().startswith("aten::")])
        found = []
        for _ in range(2):
            y = traced(x)
            y.square().sum().backward()
            found.append(y)
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(p.grad)
        return found, grads(net)

    same(run)
    assert kinds[0]
    assert kinds[1] == kinds[0]
