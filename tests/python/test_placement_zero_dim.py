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


SEVERAL = {
    "kthvalue": lambda x, out: torch.kthvalue(x[0], 2, out=out),
    "slogdet": lambda x, out: torch.linalg.slogdet(x, out=out),
    "cholesky_ex": lambda x, out: torch.linalg.cholesky_ex(x @ x.mT + 4 * torch.eye(4, device=x.device), out=out),
    "unbind_copy": lambda x, out: torch.unbind_copy(x[0, :2], out=list(out)) or out,
}


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("which", [0, 1])
def test_zero_dim_that_is_written_to_decides(name, which):
    """Of several results some are 0-dim: written elsewhere, these say where it computes."""
    x = at(CPU, 4, 4)
    run = SEVERAL[name]

    def outs(devices):
        empty = {"kthvalue": [torch.float32, torch.int64], "cholesky_ex": [torch.float32, torch.int32]}
        dtypes = empty.get(name, [torch.float32] * 2)
        shapes = [(4, 4), ()] if name == "cholesky_ex" else [(), ()]
        return tuple(torch.zeros(s, dtype=t, device=d) for s, t, d in zip(shapes, dtypes, devices, strict=True))

    expected = run(x.to(COMPUTE), outs((COMPUTE, COMPUTE)))
    devices = [OFFLOAD, OFFLOAD]
    devices[which] = COMPUTE
    out = outs(devices)
    versions = [t._version for t in out]
    run(x.to(OFFLOAD), out)
    assert [t.device.type for t in out] == [d.type for d in devices]
    assert all(t._version > version for t, version in zip(out, versions, strict=True))
    assert_same(list(out), list(expected))


@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_the_old_shape_of_an_out_says_nothing(shape):
    """A 0-dim operand decides beside an `out=` on offload: this takes the result's shape."""
    x = torch.tensor(0.7, device=COMPUTE)
    out = torch.empty(shape, device=OFFLOAD)
    if shape == (3,):
        with pytest.warns(UserWarning, match="resized"):
            torch.lgamma(x, out=out)
    else:
        torch.lgamma(x, out=out)
    assert_same(out, torch.lgamma(x))
