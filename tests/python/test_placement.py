"""The placement rule, row by row: where a result lives, and what its values are."""

import contextlib

import pytest
import torch
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same, at, same

import torch_offload

# Of two tensors of 4 x 4: operations of several kinds.
BINARY = {
    "add": lambda a, b: a + b,
    "sub with alpha": lambda a, b: torch.sub(a, b, alpha=2),
    "mul broadcast": lambda a, b: a * b[0],
    "div": lambda a, b: a / b,
    "matmul": lambda a, b: a @ b,
    "mv": lambda a, b: a @ b[0],
    "dot": lambda a, b: a[0] @ b[0],
    "addmm": lambda a, b: torch.addmm(b, a, b),
    "bmm": lambda a, b: torch.bmm(a.view(1, 4, 4), b.view(1, 4, 4)),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "compare": lambda a, b: a < b,
    "maximum": lambda a, b: torch.maximum(a, b),
    "cat": lambda a, b: torch.cat([a, b, a]),
    "stack": lambda a, b: torch.stack([b, a], dim=1),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "cdist": lambda a, b: torch.cdist(a, b),
    "cosine": lambda a, b: torch.nn.functional.cosine_similarity(a, b),
    "index": lambda a, b: a[b.argsort(dim=1)[0]],
    "gather": lambda a, b: a.gather(1, b.argsort(dim=1)),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 2.0),
    "index_select": lambda a, b: a.index_select(0, b[0].argsort()),
    "foreach": lambda a, b: torch._foreach_add([a, b], [b, a]),
    "meshgrid": lambda a, b: [t * 1 for t in torch.meshgrid(a[0], b[0], indexing="ij")],
    "kron": lambda a, b: torch.kron(a, b),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=1),
    "block_diag": lambda a, b: torch.block_diag(a, b),
    "vstack": lambda a, b: torch.vstack([a, b]),
    "allclose": lambda a, b: torch.tensor(torch.allclose(a, b)),
    "equal": lambda a, b: torch.tensor(torch.equal(a, b)),
    "attention": lambda a, b: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], b[None]),
    "copysign": lambda a, b: torch.copysign(a, b),
    "atan2": lambda a, b: torch.atan2(a, b),
    "searchsorted": lambda a, b: torch.searchsorted(a.sort().values, b),
    "scatter": lambda a, b: a.scatter(1, b.argsort(dim=1), b),
    "index_add": lambda a, b: a.index_add(0, b[0].argsort(), b),
    "take_along_dim": lambda a, b: torch.take_along_dim(a, b.argsort(dim=1), dim=1),
    "isin": lambda a, b: torch.isin(a, b),
}


IN_PLACE = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(b),
    "addmm_": lambda a, b: a.addmm_(b, b),
    "copy_": lambda a, b: a.copy_(b),
    "lerp_": lambda a, b: a.lerp_(b, 0.5),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, 1.0),
    "setitem": lambda a, b: a.__setitem__((slice(0, 2),), b[1:3]),
    "setitem mask": lambda a, b: a.__setitem__(b > 0, 3.0),
    "index_put": lambda a, b: a.__setitem__(b[0].argsort(), b),
    "of a view": lambda a, b: a[1:, ::2].add_(b[1:, ::2]),
    "of a transposed view": lambda a, b: a.t().mul_(b),
    "addcmul_": lambda a, b: a.addcmul_(b, b, value=0.5),
    "scatter_": lambda a, b: a.scatter_(1, b.argsort(dim=1), b),
    "index_add_": lambda a, b: a.index_add_(0, b[0].argsort(), b),
    "foreach": lambda a, b: torch._foreach_mul_([a], [b]),
    "fill_diagonal": lambda a, b: a.fill_diagonal_(2.0),
    "out": lambda a, b: torch.add(a, b, out=a),
    "out of matmul": lambda a, b: torch.matmul(b, b, out=a),
    "out of sum": lambda a, b: torch.sum(b, dim=0, keepdim=True, out=a[:1]),
    "pow_": lambda a, b: a.abs_().pow_(b),
}


UNARY = {
    "exp": torch.exp,
    "sum": torch.sum,
    "sum of rows": lambda a: a.sum(1),
    "mean": torch.mean,
    "var": torch.var,
    "std": torch.std,
    "norm": torch.norm,
    "linalg norm": torch.linalg.vector_norm,
    "softmax": lambda a: a.softmax(-1),
    "logsumexp": lambda a: a.logsumexp(0),
    "cumsum": lambda a: a.cumsum(0),
    "max": torch.max,
    "max of rows": lambda a: a.max(1),
    "sort": lambda a: a.sort(dim=1),
    "topk": lambda a: a.topk(2),
    "argmax": torch.argmax,
    "neg": torch.neg,
    "abs": torch.abs,
    "reciprocal": torch.reciprocal,
    "scalar arithmetic": lambda a: (a * 2 + 1) / 3 - a**2,
    "comparison": lambda a: a > 0,
    "clone": torch.clone,
    "contiguous": lambda a: a.t().contiguous(),
    "cast": lambda a: a.to(torch.bfloat16),
    "cast up": lambda a: a.double(),
    "flip": lambda a: a.flip(0),
    "roll": lambda a: a.roll(1, 0),
    "tril": torch.tril,
    "pad": lambda a: torch.nn.functional.pad(a, (1, 2)),
    "repeat": lambda a: a.repeat(2, 1),
    "reshape": lambda a: a.t().reshape(2, 8),
    "unique": torch.unique,
    "nonzero": torch.nonzero,
    "boolean mask": lambda a: a[a > 0],
    "integer index": lambda a: a[[2, 0]],
    "clamp": lambda a: a.clamp(-0.5, 0.5),
    "round": torch.round,
    "qr": lambda a: torch.linalg.qr(a),
    "svd": lambda a: torch.linalg.svdvals(a),
    "inverse": torch.inverse,
    "det": torch.det,
    "fft": lambda a: torch.fft.fft(a),
    "conj": lambda a: torch.complex(a, a).conj() * 2,
    "cumprod": lambda a: a.cumprod(1),
    "histc": lambda a: torch.histc(a, 4),
    "bincount": lambda a: torch.bincount(a.abs().long().flatten()),
    "one_hot": lambda a: torch.nn.functional.one_hot(a.abs().long()),
    "ones_like": torch.ones_like,
    "new_full": lambda a: a.new_full((2,), 3.0),
    "all": lambda a: (a > -9).all(),
    "any": lambda a: (a > 9).any(),
    "isnan": torch.isnan,
    "nan_to_num": lambda a: torch.nan_to_num(a.log()),
    "diff": torch.diff,
    "quantile": lambda a: torch.quantile(a, 0.3),
    "median": lambda a: a.median(0),
    "interpolate": lambda a: torch.nn.functional.interpolate(a[None], 8),
}


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


def check(value, expected, device):
    for got, want in zip(leaves(value), leaves(expected), strict=True):
        # What says yes or no (allclose, equal) has no device.
        assert got.device.type == device.type or got.dtype == torch.bool
        assert_same(got, want)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("first", [True, False], ids=["offload first", "offload second"])
def test_offload_and_plain_computes_there(name, first):
    a, b = at(COMPUTE, 4, 4), at(COMPUTE, 4, 4, seed=1)
    expected = BINARY[name](a, b)
    value = BINARY[name](a.to(OFFLOAD), b) if first else BINARY[name](a, b.to(OFFLOAD))
    check(value, expected, COMPUTE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("first", [True, False], ids=["offload first", "offload second"])
def test_offload_and_cpu_computes_on_the_cpu(name, first):
    a, b = at(CPU, 4, 4), at(CPU, 4, 4, seed=1)
    expected = BINARY[name](a, b)
    value = BINARY[name](a.to(OFFLOAD), b) if first else BINARY[name](a, b.to(OFFLOAD))
    check(value, expected, CPU)


@pytest.mark.parametrize("name", BINARY)
def test_offload_only_makes_a_new_value(name):
    a, b = at(COMPUTE, 4, 4), at(COMPUTE, 4, 4, seed=1)
    expected = BINARY[name](a, b)
    value = BINARY[name](a.to(OFFLOAD), b.to(OFFLOAD))
    if name in ("allclose", "equal"):
        assert_same(value, expected)
    else:
        check(value, expected, OFFLOAD)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.filterwarnings("ignore:.*")
def test_one_offload_operand(name):
    a = at(COMPUTE, 4, 4)
    check(UNARY[name](a.to(OFFLOAD)), UNARY[name](a), OFFLOAD)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.filterwarnings("ignore:.*")
def test_one_operand_that_was_computed(name):
    """Born on the device, where there is one."""
    a = at(COMPUTE, 4, 4)
    check(UNARY[name](a.to(OFFLOAD) * 2), UNARY[name](a * 2), OFFLOAD)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.filterwarnings("ignore:.*")
def test_on_host(name):
    a = at(CPU, 4, 4)
    with torch_offload.on_host():
        value = UNARY[name](a.to(OFFLOAD))
    check(value, UNARY[name](a), OFFLOAD)


@pytest.mark.parametrize("name", BINARY)
def test_two_operands_on_host(name):
    a, b = at(CPU, 4, 4), at(CPU, 4, 4, seed=1)
    with torch_offload.on_host():
        value = BINARY[name](a.to(OFFLOAD), b.to(OFFLOAD))
    if name in ("allclose", "equal"):
        assert_same(value, BINARY[name](a, b))
    else:
        check(value, BINARY[name](a, b), OFFLOAD)


def changes_in_place(name, target, other, a, b):
    """What happens to the target is what happens to the plain ``a``; the same tensor, its version bumped."""
    version, plain_version = target._version, a._version
    IN_PLACE[name](a, b)
    result = IN_PLACE[name](target, other)
    assert_same(target, a)
    assert target._version - version == a._version - plain_version
    if isinstance(result, torch.Tensor) and name not in ("of a view", "of a transposed view", "out of sum"):
        assert result is target


@pytest.mark.parametrize("born", ["host", "device"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name, born):
    """Where the target was born."""
    truth = CPU if born == "host" else COMPUTE
    a, b = at(truth, 4, 4), at(truth, 4, 4, seed=1)
    target = a.to(OFFLOAD)
    if born == "device":
        target = target * 1
    address = target.data_ptr()
    changes_in_place(name, target, b.to(OFFLOAD), a, b)
    assert target.device.type == "offload"
    assert target.data_ptr() == address


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_with_a_plain_operand(name):
    """The target stays offload, and follows the operand for the computation."""
    a, b = at(COMPUTE, 4, 4), at(COMPUTE, 4, 4, seed=1)
    target = a.to(OFFLOAD)
    changes_in_place(name, target, b, a, b)
    assert target.device.type == "offload"


@pytest.mark.parametrize("name", IN_PLACE)
def test_plain_target_with_an_offload_operand(name):
    a, b = at(COMPUTE, 4, 4), at(COMPUTE, 4, 4, seed=1)
    target = a.clone()
    changes_in_place(name, target, b.to(OFFLOAD), a, b)
    assert target.device == COMPUTE


@pytest.mark.parametrize("shape", [(0,), (3,), (7, 2), (9, 9)])
@pytest.mark.parametrize("name", ["add", "mul", "exp", "matmul", "silu", "nan_to_num"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_of_another_shape_is_resized(name, shape):
    a = at(OFFLOAD, 4, 4)
    operands = (a, a) if name in ("add", "mul", "matmul") else (a,)
    function = torch.nn.functional.silu if name == "silu" else getattr(torch, name)
    if name == "silu":
        function = torch.ops.aten.silu.out
    expected = function(*[t.cpu() for t in operands], out=torch.empty(0))
    out = torch.empty(shape, device=OFFLOAD)
    result = function(*operands, out=out)
    assert result is out
    assert out.device.type == "offload"
    if not GPU:
        assert_same(out, expected)
    assert out.shape == expected.shape


@torch.no_grad()
@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_is_a_leaf_is_resized(feed):
    operand, out = at(OFFLOAD if feed == "offload" else COMPUTE, 6, 8), at(OFFLOAD, 4, 8).requires_grad_()
    assert torch.add(operand, 1, out=out) is out
    assert out.requires_grad
    assert out.is_leaf
    assert_same(out, operand + 1)


@pytest.mark.gpu
def test_offload_cuda_and_cpu_is_an_error():
    with pytest.raises(RuntimeError, match="same device"):
        torch.addmm(at(OFFLOAD, 4, 4), at("cuda", 4, 4), at(CPU, 4, 4))
    with pytest.raises(RuntimeError, match="same device"):
        torch.where(at(OFFLOAD, 4) > 0, at("cuda", 4), at(CPU, 4))


def test_comparisons_and_truth():
    a = at(OFFLOAD, 4, 4)
    assert bool((a == a).all())
    assert a.sum().item() == at(COMPUTE, 4, 4).sum().item()
    assert int(torch.tensor(3, device=OFFLOAD)) == 3
    assert [1, 2, 3][torch.tensor(1, device=OFFLOAD)] == 2
    assert len(a) == 4
    assert [row.device.type for row in a] == ["offload"] * 4


def test_indices_of_another_device():
    a = at(OFFLOAD, 4, 4)
    expected = at(CPU, 4, 4)
    for place in (CPU, COMPUTE, OFFLOAD):
        index = torch.tensor([2, 0], device=place)
        assert_same(a[index], expected[[2, 0]])
        assert_same(a[torch.tensor([True, False, True, False], device=place)], expected[[0, 2]])
        assert_same(at(COMPUTE, 4, 4)[index], expected[[2, 0]])


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("feed", [COMPUTE, OFFLOAD], ids=["plain", "offload"])
def test_an_operand_that_is_given_several_times_is_one(feed, mode):
    """By which PyTorch chooses how to multiply: attention of a tensor to itself."""

    def run(device):
        torch.manual_seed(0)
        attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval().to(device)
        x = at(device if feed is OFFLOAD else COMPUTE, 2, 4, 8)
        with mode():
            return attention(x, x, x)[0].detach()

    same(run)


@pytest.mark.parametrize(
    "operation",
    [
        lambda w, x: torch.add(w, x, out=w),
        lambda w, x: torch.maximum(x, w, out=w),
        lambda w, x: torch.where(x > 0, w, x, out=w),
        lambda w, x: torch.addcmul(w, x, w, out=w),
    ],
    ids=["add", "maximum", "where", "addcmul"],
)
@pytest.mark.parametrize("feed", [COMPUTE, OFFLOAD], ids=["plain", "offload"])
def test_a_result_that_is_an_operand_too(feed, operation):
    def run(device):
        w, x = at(device, 3, 4), at(device if feed is OFFLOAD else COMPUTE, 3, 4, seed=1)
        result = operation(w, x)
        assert result is w
        small = at(device, 4)
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            operation(small, x)
        assert small.shape == (4,)
        return w, small

    same(run)


def test_a_type_that_is_taken_from_an_offload_tensor():
    """Activations stay where they are; beside a GPU what is on the CPU goes where `to` would move it."""
    w = torch.zeros(3, dtype=torch.float64, device=OFFLOAD)
    assert torch.ones(3, device=COMPUTE).type_as(w).device == COMPUTE
    moved = torch.ones(3).type_as(w)
    assert moved.dtype == torch.float64
    assert moved.device.type == ("offload" if COMPUTE.type == "cuda" else "cpu")
    assert w.type_as(torch.ones(3)).device.type == "cpu"
