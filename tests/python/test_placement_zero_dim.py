"""The placement rule for 0-dim tensors, which on any device count as nothing beside tensors with dims."""

import pytest
import torch
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same, at


@pytest.mark.parametrize("scalar", [CPU, COMPUTE, OFFLOAD], ids=str)
@pytest.mark.parametrize("tensor", [CPU, COMPUTE, OFFLOAD], ids=str)
@pytest.mark.parametrize("order", [1, -1])
def test_zero_dim_beside_dims(tensor, scalar, order):
    if GPU and tensor == CPU and scalar == COMPUTE:
        pytest.skip("PyTorch refuses it, and no offload tensor is among them")
    t, s = at(CPU, 3, 4), torch.tensor(2.5)
    expected = torch.mul(*[t, s][::order])
    result = torch.mul(*[t.to(tensor), s.to(scalar)][::order])
    assert result.device.type == tensor.type
    assert_same(result, expected)


@pytest.mark.parametrize("other", [CPU, COMPUTE], ids=str)
def test_zero_dim_beside_zero_dim(other):
    a, b = torch.tensor(2.5), torch.tensor(4.0)
    result = a.to(OFFLOAD) + b.to(OFFLOAD)
    assert (result.device.type, result.item()) == ("offload", 6.5)
    mixed = a.to(OFFLOAD) + b.to(other)
    assert mixed.item() == 6.5
    assert mixed.device.type == ("cuda" if other.type == "cuda" else "offload")


def test_zero_dim_in_place():
    total = torch.zeros((), device=OFFLOAD)
    version = total._version
    total += torch.tensor(2.0)
    total.add_(torch.tensor(3.0, device=COMPUTE))
    total.mul_(2)
    assert total.item() == 10
    assert total.device.type == "offload"
    assert total._version == version + 3
    plain = torch.zeros(3, device=COMPUTE)
    plain += torch.tensor(2.0, device=OFFLOAD)
    assert plain.tolist() == [2.0] * 3


def test_zero_dim_offload_weight_beside_activations_has_a_gradient():
    scale = torch.tensor(2.0, device=OFFLOAD, requires_grad=True)
    x = at(COMPUTE, 3, 4)
    y = x * scale
    assert y.device == COMPUTE
    y.sum().backward()
    assert scale.grad.device.type == "offload"
    assert scale.grad.shape == ()
    assert_same(scale.grad, x.sum())


@pytest.mark.gpu
def test_zero_dim_cuda_beside_cpu_dims_is_pytorchs_error_or_value():
    result = at(CPU, 4) * torch.tensor(2.0, device=OFFLOAD)
    assert result.device.type == "cpu"
