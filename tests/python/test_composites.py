"""Operations made of operations: taken whole beside other devices' tensors, apart on offload alone; and what autograd makes of both."""

import pytest
import torch
from helpers import COMPUTE, CPU, OFFLOAD, assert_same, at


def test_gradient_of_zeros_without_memory():
    x = at(OFFLOAD, 5, 5).requires_grad_()
    torch.sgn(x).sum().backward()
    assert x.grad.device.type == "offload"
    assert_same(x.grad, torch.zeros(5, 5))
    y = at(COMPUTE, 5, 5).requires_grad_()
    (torch.sgn(x) * y).sum().backward()
    assert_same(y.grad, torch.sgn(x.detach()))


@pytest.mark.parametrize("device", [CPU, OFFLOAD])
def test_split_at_positions_on_offload(device):
    x = at(device, 6, 2)
    parts = torch.tensor_split(x, torch.tensor([1, 4]).to(OFFLOAD))
    assert_same(parts, torch.tensor_split(at(CPU, 6, 2), (1, 4)))
    x.zero_()
    assert_same(parts[1], torch.zeros(3, 2))
