"""Writes to sparse tensors: they are made where the tensor was born, and seen by whoever shares parts that PyTorch keeps."""

import pytest
import torch
from helpers import CACHED, COMPUTE, CPU, OFFLOAD, assert_same, at, same
from sparse_tensors import coo, parts, same_parts
from torch import nn

import torch_offload

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


WRITES = {
    "add_": lambda a, b: a.add_(b),
    "sub_": lambda a, b: a.sub_(b),
    "mul_": lambda a, b: a.mul_(3),
    "div_": lambda a, b: a.div_(2),
    "neg_": lambda a, b: a.neg_(),
    "zero_": lambda a, b: a.zero_(),
    "copy_": lambda a, b: a.copy_(b),
    "t_": lambda a, b: a.t_(),
    "resize_as_sparse_": lambda a, b: torch.resize_as_sparse_(a, b),
    "sparse_resize_": lambda a, b: a.sparse_resize_((9, 9), 2, 0),
    "sparse_resize_and_clear_": lambda a, b: a.sparse_resize_and_clear_((9, 9), 2, 0),
    "_coalesced_": lambda a, b: a._coalesced_(False),
    "values": lambda a, b: a._values().mul_(2) is not None and a,
    "values of a view": lambda a, b: a._values()[1:3].fill_(9) is not None and a,
    "out": lambda a, b: torch.add(a, b, out=a),
}


@pytest.mark.parametrize("born", ["host", "device"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes(write, born):
    """They are made where the target was born."""

    def run(device):
        a, b = coo(device, born=born), coo(device, seed=4, born=born)
        before = a._version
        assert write(a, b) is a
        return [a, b, a._version > before]

    assert parts(same_parts(run, CPU if born == "host" else COMPUTE))[0][0].is_offload


@pytest.mark.parametrize("write", ["dense", "sparse", "mm out"])
def test_writes_beside_the_plain_device(write):
    def run(device):
        sparse, dense = coo(device), at(device, 5, 4)
        if write == "dense":
            return dense.add_(coo(COMPUTE), alpha=2)
        if write == "sparse":
            return sparse.add_(coo(COMPUTE, seed=5))
        return torch.mm(coo(COMPUTE), at(device, 4, 4), out=dense)

    assert same_parts(run).is_offload


def test_a_write_to_a_dense_one():
    def run(device):
        dense = at(device, 5, 4)
        dense.add_(coo(device), alpha=-0.1)
        dense.add_(coo(device, seed=9, born="device"))
        return dense

    assert same(run, truth=CPU).is_offload


SHARED = {
    "detach": lambda sparse: sparse.detach(),
    "data": lambda sparse: sparse.data,
    "values": lambda sparse: sparse._values(),
    "some values": lambda sparse: sparse._values()[1:4],
    "indices": lambda sparse: sparse._indices(),
}
SEEN = {
    "neg_": lambda sparse: sparse.neg_(),
    "div_": lambda sparse: sparse.div_(4),
    "mul_": lambda sparse: sparse.mul_(4),
    "abs_": lambda sparse: sparse.abs_(),
    "zero_": lambda sparse: sparse.zero_(),
    "add_": lambda sparse: sparse.add_(sparse),
}


@pytest.mark.parametrize("born", ["host", "device"])
@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("write", SEEN.values(), ids=SEEN)
def test_who_shares_the_parts(write, shared, born):
    def run(device):
        sparse = coo(CPU).coalesce().to(device)
        if born == "device":
            sparse = sparse * 1
        other = shared(sparse)
        write(sparse)
        before = parts(other.clone())
        (other._values() if other.is_sparse else other).add_(1)
        return [parts(sparse), parts(other), before]

    same(run, truth=CPU if born == "host" else COMPUTE)


@pytest.mark.parametrize("alias", ["data", "detach"])
def test_a_gradient_is_scaled(alias):
    def run(device):
        net = nn.Embedding(5, 2, sparse=True).to(device)
        net(torch.tensor([1, 2, 1], device=COMPUTE)).square().sum().backward()
        gradient = net.weight.grad
        (gradient.data if alias == "data" else gradient.detach()).div_(4)
        return net.weight.grad

    same_parts(run)


def test_values_that_a_tensor_is_made_of():
    def run(device):
        values = at(device, 2) * 1
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]], device=device), values, (3,))
        sparse.div_(2)
        values.add_(1)
        return [values, sparse]

    same_parts(run)


def test_a_write_with_history():
    def run(device):
        x = coo(device).coalesce().requires_grad_()
        sparse = x * 1
        other = sparse.detach()
        sparse.div_(2)
        torch.sparse.mm(sparse, at(COMPUTE, 4, 3)).sum().backward()
        return [sparse.detach(), other, x.grad.to_dense()]

    same_parts(run)


def test_values_that_change_before_backward():
    """By way of what the tensor was made of, whose writes are not the tensor's: backward reads what is there then."""

    def run(device):
        values, x = at(device, 3), at(COMPUTE, 4, 3).requires_grad_()
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2], [1, 0, 3]], device=device), values, (3, 4))
        loss = torch.sparse.mm(sparse, x).sum()
        values.mul_(3)
        loss.backward()
        return x.grad

    same(run)


@pytest.mark.skipif(not CACHED, reason="nothing is fetched")
def test_where_it_was_born_does_not_change():
    """By what a write fetches: of a tensor that was born on the host nothing."""

    def fetches(sparse):
        before = torch_offload.stats()["fetches"]
        sparse.mul_(2)
        return torch_offload.stats()["fetches"] - before

    assert fetches(coo()) == 0
    assert fetches(coo().add_(coo(COMPUTE))) == 0
    assert fetches(coo().copy_(coo(born="device"))) == 0
    assert fetches(coo(COMPUTE).to(OFFLOAD)) == 0
    assert fetches(coo(born="device")) == 2
    assert fetches(coo(born="device").copy_(coo())) == 2
    assert fetches(coo(born="device").add_(coo(COMPUTE))) == 2


@pytest.mark.skipif(not CACHED, reason="a gradient is memory of PyTorch's own")
def test_what_it_is_for_does_not_change():
    net = nn.Embedding(1000, 64, sparse=True).to(OFFLOAD)

    def gradient_bytes():
        return torch_offload.memory_stats()["host.gradient_bytes.current"]

    start, held = gradient_bytes(), []
    for _ in range(2):
        net(torch.arange(500, device=COMPUTE)).square().sum().backward()
        held.append(gradient_bytes() - start)
    net.weight.grad.mul_(0.5)
    held.append(gradient_bytes() - start)
    values = 500 * (64 * 4 + 8)
    assert held[0] == values
    assert held[1] == held[2]
    assert held[1] in (values, 2 * values)  # a sum keeps both places, or merges them
    net.weight.grad.zero_()
    net(torch.arange(500, device=COMPUTE)).square().sum().backward()
    assert gradient_bytes() - start == values


class Written(torch.autograd.Function):
    """Writes to its sparse operand, in one way or another."""

    @staticmethod
    def forward(ctx, sparse, x, how):
        ctx.save_for_backward(sparse)
        if how == "returned":
            ctx.mark_dirty(sparse)
            return sparse.add_(sparse)
        if how == "values":
            sparse._values().mul_(3)
        if how == "quietly":
            sparse.add_(sparse)
        return torch.sparse.mm(sparse, x)

    @staticmethod
    def backward(ctx, gradient):
        return None, torch.sparse.mm(ctx.saved_tensors[0].t(), gradient), None


@pytest.mark.parametrize("how", ["returned", "values", "quietly", "not at all"])
def test_a_users_function(how):
    def run(device):
        sparse, x = coo(device).coalesce(), at(COMPUTE, 5, 3)[:4].requires_grad_()
        result = Written.apply(sparse, x, how)
        if how in ("values", "not at all"):
            result.square().sum().backward()
        return [result, sparse, result is sparse]

    same_parts(run)


def test_who_else_holds_the_parts_of_a_result():
    """An operation of a library's may keep what it returns, and write to that."""
    kept = []

    def function(x):
        result = torch.sparse_coo_tensor(torch.tensor([[0, 1]], device=x.device), x * 2, (2,))
        kept.append(result.detach())
        return result

    with torch.library._scoped_library("sparse_writes", "DEF") as library:
        library.define("make(Tensor x) -> Tensor")
        library.impl("make", function, "CompositeExplicitAutograd")
        made = torch.ops.sparse_writes.make(torch.ones(2, device=OFFLOAD))
    assert made.is_offload
    if not kept[0].is_offload:
        kept[0]._values().fill_(9)
    assert_same(made._values(), torch.full((2,), 2.0))
