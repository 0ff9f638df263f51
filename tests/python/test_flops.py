"""FLOP counters see the operations themselves, and so the same work as on the plain device: no more, and none hidden."""

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, data
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), (4, 8)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 3)), (2, 3, 6, 6)),
    "attention": (Attention, (2, 5, 8)),
}
# Of the parameters that are trained, how their names begin or end; and whether the input's gradient is needed.
NEEDED = {
    "everything": ("", True),
    "not the input's": ("", False),
    "biases": ("bias", True),
    "biases alone": ("bias", False),
    "the input's alone": (None, True),
}


def counted(make, shape, needed, device, feed):
    torch.manual_seed(0)
    net, (trained, input_too) = make().to(device), NEEDED[needed]
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(trained is not None and name.endswith(trained))
    x = data(*shape).to(feed).requires_grad_(input_too)
    counts = []
    for part in ("forward", "backward"):
        with FlopCounterMode(display=False) as counter:
            if part == "forward":
                y = net(x)
            else:
                y.square().sum().backward()
        counts.append({module: {str(op): n for op, n in ops.items()} for module, ops in counter.flop_counts.items()})
    return counts


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("name", MODELS)
def test_the_plain_models_work_and_no_more(name, needed, feed):
    make, shape = MODELS[name]
    plain = counted(make, shape, needed, COMPUTE, COMPUTE)
    assert counted(make, shape, needed, OFFLOAD, OFFLOAD if feed == "offload" else COMPUTE) == plain
    assert all(plain[0].values())


def test_a_frozen_weight_has_no_product_of_its_own():
    """Three products of 2 * 4 * 8 * 16 FLOPs for a layer that is trained, two and one where a gradient is not needed."""

    def flops(weight, x):
        with FlopCounterMode(display=False) as counter:
            layer = nn.Linear(8, 16).to(OFFLOAD)
            layer.weight.requires_grad_(weight)
            layer(data(4, 8).requires_grad_(x)).sum().backward()
        return counter.get_total_flops() // (2 * 4 * 8 * 16)

    assert [flops(*which) for which in ((True, True), (True, False), (False, True), (False, False))] == [3, 2, 2, 1]
