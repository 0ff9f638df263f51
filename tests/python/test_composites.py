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


def test_gradient_through_a_write_keeps_the_sign_of_zero():
    def gradient(home):
        x = torch.ones(4, device=home).requires_grad_()
        y = x.clone()
        y.mul_(torch.tensor([-0.0, 0.0, -1.0, 1.0], device=COMPUTE))
        y.backward(torch.ones(4, device=home))
        return x.grad

    assert_same(gradient(OFFLOAD), gradient(COMPUTE))


def test_written_beside_the_plain_device_is_in_the_graph_once():
    x = at(OFFLOAD, 4).requires_grad_()
    y = x.clone()
    first, version = y[:2], y._version
    first.mul_(at(COMPUTE, 2, seed=1))
    assert y._version == version + 1
    (y * y).sum().backward()
    factor = at(CPU, 2, seed=1)
    expected = torch.cat([2 * (x.detach().cpu()[:2] * factor) * factor, 2 * x.detach().cpu()[2:]])
    assert_same(x.grad, expected)
    leaf = at(OFFLOAD, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        leaf.mul_(at(COMPUTE, 4))
