"""Composite operations: whole beside tensors of other devices, in parts on offload alone; and what autograd makes of either."""

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, CPU, OFFLOAD, assert_same, at

# They compare devices before they call anything.
MIXED = {
    "quantile": lambda x, y: torch.quantile(x, y[0].sigmoid(), dim=1),
    "nanquantile": lambda x, y: torch.nanquantile(x, y[0].sigmoid()),
    "diff": lambda x, y: torch.diff(x, prepend=y, dim=0),
    "matrix_rank": lambda x, y: torch.linalg.matrix_rank(x, atol=y[0, :1].abs()),
    "pinv": lambda x, y: torch.linalg.pinv(x, rtol=y[0, :1].abs()),
    "vecdot": lambda x, y: torch.linalg.vecdot(x, y),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "gradient": lambda x, y: torch.gradient(x, spacing=(y[0],), dim=(1,))[0],
    "meshgrid": lambda x, y: [t.clone() for t in torch.meshgrid(x[0], y[0], indexing="ij")],
    "take_along_dim": lambda x, y: torch.take_along_dim(x, y.argsort(dim=1), 1),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("here", [(OFFLOAD, COMPUTE), (COMPUTE, OFFLOAD)], ids=["first", "second"])
def test_beside_the_plain_device(name, here):
    x, y = at(CPU, 4, 4), at(CPU, 4, 4, seed=1)
    expected = MIXED[name](x.to(COMPUTE), y.to(COMPUTE))
    actual = MIXED[name](x.to(here[0]), y.to(here[1]))
    assert_same(actual, expected)
    assert (actual[0] if isinstance(actual, list) else actual).device == COMPUTE


OUT = {
    "norm": torch.linalg.norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "inner": lambda x, out: torch.inner(x, x, out=out),
    "vecdot": lambda x, out: torch.linalg.vecdot(x, x, out=out),
    "matrix_power": lambda x, out: torch.linalg.matrix_power(x, 3, out=out),
    "quantile": lambda x, out: torch.quantile(x, 0.3, dim=1, out=out),
    "ndtr": lambda x, out: torch.special.ndtr(x, out=out),
}


@pytest.mark.parametrize("size", [None, 0])
@pytest.mark.parametrize("name", OUT)
@pytest.mark.parametrize(
    "here", [(OFFLOAD, COMPUTE), (COMPUTE, OFFLOAD), (OFFLOAD, OFFLOAD)], ids=["operand", "out", "both"]
)
def test_out(name, here, size):
    x = at(CPU, 4, 4)
    plain = torch.empty(0, device=here[0] if here == (OFFLOAD, OFFLOAD) else COMPUTE)
    truth = CPU if here == (OFFLOAD, OFFLOAD) else COMPUTE  # what is written is written where it was born
    expected = OUT[name](x.to(truth), out=plain.new_empty(0, device=truth))
    out = torch.empty(expected.shape if size is None else 0, device=here[1])
    version = out._version
    assert OUT[name](x.to(here[0]), out=out) is out
    assert out.device.type == here[1].type
    assert out._version > version
    assert_same(out, expected)


@pytest.mark.parametrize("function", [F.silu, F.mish], ids=["silu", "mish"])
def test_backward_with_a_kernel_of_its_own(function):
    # The decomposition of silu_backward rounds otherwise than the kernel that the CPU and CUDA have.
    def gradient(device):
        x = at(CPU, 64, 64).to(device).requires_grad_()
        y = x.clone()
        function(y, inplace=True).sum().backward()
        return x.grad

    # The result was born on the host, and so is where it is written; its gradient is computed on the compute device.
    assert_same(gradient(OFFLOAD), gradient(COMPUTE))


def test_gradient_of_zeros_without_memory():
    x = at(OFFLOAD, 5, 5).requires_grad_()
    torch.sgn(x).sum().backward()
    assert x.grad.device.type == "offload"
    assert_same(x.grad, torch.zeros(5, 5))
    y = at(COMPUTE, 5, 5).requires_grad_()
    (torch.sgn(x) * y).sum().backward()
    assert_same(y.grad, torch.sgn(x.detach()))


@pytest.mark.parametrize("inference", [False, True])
def test_results_that_are_views(inference):
    with torch.inference_mode(inference):
        x, y = at(OFFLOAD, 4), at(OFFLOAD, 3)
        columns, _ = torch.meshgrid(x, y, indexing="ij")
        halves = torch.unsafe_split(x, 2)
        x.fill_(7.0)
        assert_same(columns, torch.full((4, 3), 7.0))
        assert columns.stride() == (1, 0)
        assert_same(halves[1], torch.full((2,), 7.0))


@pytest.mark.parametrize("device", [CPU, OFFLOAD])
def test_split_at_positions_on_offload(device):
    x = at(device, 6, 2)
    parts = torch.tensor_split(x, torch.tensor([1, 4]).to(OFFLOAD))
    assert_same(parts, torch.tensor_split(at(CPU, 6, 2), (1, 4)))
    x.zero_()
    assert_same(parts[1], torch.zeros(3, 2))


def test_write_to_a_plain_zero_dim_tensor():
    # It decides where: there is nothing else to write to.
    target = torch.tensor(1.0, device=COMPUTE).requires_grad_()
    source = torch.tensor([3.0], device=OFFLOAD).requires_grad_()
    index = torch.tensor([0], device=COMPUTE)
    (target * 1).put_(index, source, accumulate=True).mul(2).backward()
    assert_same([target.grad, source.grad], [torch.tensor(2.0), torch.tensor([2.0])])
    assert (target.grad.device, source.grad.device.type) == (COMPUTE, "offload")


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
