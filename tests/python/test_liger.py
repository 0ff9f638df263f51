"""Liger's Triton kernels, which are launched by hand on what they are given, over offload weights."""

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, assert_same, at, data, deterministic
from torch import nn

pytestmark = pytest.mark.gpu
liger = pytest.importorskip("liger_kernel.transformers")
functional = pytest.importorskip("liger_kernel.transformers.functional")

WIDTH, WORDS = 64, 96


class Net(nn.Module):
    """Norm, gated feed-forward and the head that is one with its loss."""

    def __init__(self):
        super().__init__()
        self.rms, self.layer = liger.LigerRMSNorm(WIDTH), liger.LigerLayerNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Parameter(torch.empty(WORDS, WIDTH))

    def forward(self, x, target):
        x = self.rms(x)
        x = x + self.down(functional.liger_swiglu(self.gate(x), self.up(x)))
        x = self.layer(x)
        return functional.liger_fused_linear_cross_entropy(x, self.head, target), x


def make(device):
    net = Net()
    with torch.no_grad():
        for k, parameter in enumerate(net.parameters()):
            parameter.copy_(at("cpu", *parameter.shape, seed=k) / 4)
    return net.to(device)


@pytest.mark.parametrize("fed", [COMPUTE.type, "offload"])
def test_training(fed):
    """Fed from offload, the gradients of the norms are summed in other parts: Liger asks the input's device how many."""
    found = []
    target = torch.arange(8, device=COMPUTE) % WORDS
    for device, inputs in ((COMPUTE, COMPUTE.type), (OFFLOAD, fed)):
        net = make(device)
        x = data(8, WIDTH).to(inputs).requires_grad_()
        with deterministic():
            loss, hidden = net(x, target.to(inputs))
            loss.backward()
        assert all(parameter.grad.device.type == torch.device(device).type for parameter in net.parameters())
        gradients = {name: parameter.grad.cpu() for name, parameter in net.named_parameters()}
        found.append([loss.detach().cpu(), hidden.detach().cpu(), x.grad.cpu(), gradients])
    for name, gradient in found[1][-1].items():
        if fed == "offload" and name.startswith(("rms", "layer")):
            torch.testing.assert_close(gradient, found[0][-1].pop(name), rtol=1e-5, atol=1e-6)
        else:
            assert_same(gradient, found[0][-1].pop(name))
    assert_same(found[1][:-1], found[0][:-1])


@pytest.mark.parametrize("operand", range(2))
def test_a_loss_of_logits(operand):
    """In place: it leaves the gradient where the logits were."""
    plain = [data(8, WORDS), torch.arange(8, device=COMPUTE) % WORDS]
    mixed = [value.to(OFFLOAD) if k == operand else value for k, value in enumerate(plain)]
    found = []
    for logits, target in (plain, mixed):
        leaf = logits.detach().clone().requires_grad_()
        loss = functional.liger_cross_entropy(leaf * 1, target)
        loss.backward()
        found.append([loss.detach().cpu(), leaf.grad.cpu()])
    assert_same(found[1], found[0])
