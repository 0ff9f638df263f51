"""Operations made of operations: taken whole beside other devices' tensors, apart on offload alone; and what autograd makes of both."""

import torch
from helpers import COMPUTE, OFFLOAD, assert_same, at


def test_gradient_of_zeros_without_memory():
    x = at(OFFLOAD, 5, 5).requires_grad_()
    torch.sgn(x).sum().backward()
    assert x.grad.device.type == "offload"
    assert_same(x.grad, torch.zeros(5, 5))
    y = at(COMPUTE, 5, 5).requires_grad_()
    (torch.sgn(x) * y).sum().backward()
    assert_same(y.grad, torch.sgn(x.detach()))
