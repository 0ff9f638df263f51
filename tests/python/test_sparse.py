"""Sparse tensors on offload: two dense ones, indices and values, that are fetched and stashed together."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from helpers import CACHED, COMPUTE, CPU, GPU, LOW, OFFLOAD, assert_same, at, passes, same, says
from sparse_tensors import coo, parts, same_parts
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_offload

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, *LOW, torch.complex64, torch.int32, torch.bool], ids=str
)
def test_there_and_back(dtype):
    plain = coo(CPU, dtype=dtype)
    offload = plain.to(OFFLOAD)
    assert (offload.device, offload.layout, offload.dtype) == (torch.device("offload:0"), torch.sparse_coo, dtype)
    assert offload._indices().is_offload
    assert offload._values().is_offload
    assert_same(parts(offload.cpu()), parts(plain))
    assert_same(parts(offload.to(COMPUTE)), parts(plain))
    assert_same(parts(plain.to(COMPUTE).to(OFFLOAD)), parts(plain))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,), device=d),
        lambda d: torch.sparse_coo_tensor(torch.tensor([[0, 2]], device=d), torch.tensor([1.0, 2.0], device=d)),
        lambda d: torch.sparse_coo_tensor((3, 2), device=d),
        lambda d: torch.zeros(3, 2, layout=torch.sparse_coo, device=d),
        lambda d: torch.empty(3, 2, layout=torch.sparse_coo, device=d, dtype=torch.float64),
        lambda d: torch.zeros_like(torch.eye(3).to_sparse(), device=d),
        lambda d: torch.zeros_like(coo(d)),
        lambda d: torch.eye(3, device=d).to_sparse(),
        lambda d: at(d, 3, 2, 2).to_sparse(1),
        lambda d: torch.sparse.spdiags(torch.ones(1, 3), torch.tensor([1]), (3, 3)).to(d),
    ],
)
def test_made(make):
    made = same_parts(make)
    assert made.device == torch.device("offload:0")
    assert made._values().is_offload


def test_the_device_that_is_named():
    with torch.device(OFFLOAD):
        assert torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,)).is_offload
        assert torch.sparse_coo_tensor((3, 2)).is_offload


ALONE = {
    "coalesce": lambda a, b: a.coalesce(),
    "indices": lambda a, b: a.coalesce().indices(),
    "values": lambda a, b: a.coalesce().values(),
    "to_dense": lambda a, b: a.to_dense(),
    "clone": lambda a, b: a.clone(),
    "detach": lambda a, b: a.detach(),
    "double": lambda a, b: a.double(),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a.coalesce() * b.coalesce(),
    "scale": lambda a, b: a * 3,
    "div": lambda a, b: a / 2,
    "neg": lambda a, b: -a,
    "pow": lambda a, b: a.coalesce() ** 2,
    "sqrt": lambda a, b: a.coalesce().abs().sqrt(),
    "t": lambda a, b: a.t(),
    "transpose": lambda a, b: a.transpose(0, 1),
    "permute": lambda a, b: a.permute(1, 0),
    "unsqueeze": lambda a, b: a.unsqueeze(0),
    "index_select": lambda a, b: a.index_select(0, torch.tensor([2, 0], device=a.device)).to_dense(),
    "select": lambda a, b: a[1],
    "narrow_copy": lambda a, b: a.narrow_copy(0, 1, 2),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "sum": lambda a, b: a.sum(),
    "sum of a dimension": lambda a, b: torch.sparse.sum(a, 0),
    "norm": lambda a, b: a.norm(),
    "softmax": lambda a, b: torch.sparse.softmax(a, 1),
    "log_softmax": lambda a, b: torch.sparse.log_softmax(a.coalesce(), 0),
    "mm of sparse ones": lambda a, b: torch.sparse.mm(a, b.t()),
    "mm": lambda a, b: torch.sparse.mm(a, at(a.device, 4, 3)),
    "matmul": lambda a, b: a @ at(a.device, 4, 3),
    "mv": lambda a, b: a.mv(at(a.device, 4)),
    "addmm": lambda a, b: torch.sparse.addmm(at(a.device, 5, 3), a, at(a.device, 4, 3), beta=2),
    "hspmm": lambda a, b: torch.hspmm(a, at(a.device, 4, 3)),
    "to a dense one": lambda a, b: at(a.device, 5, 4) + a,
    "times a dense one": lambda a, b: a.coalesce() * at(a.device, 5, 4),
    "sparse_mask": lambda a, b: at(a.device, 5, 4).sparse_mask(a.coalesce()),
    "broadcast": lambda a, b: torch.ops.aten._sparse_broadcast_to(torch.sparse.sum(a, 0).coalesce(), (2, 4)),
    "isnan": lambda a, b: a.coalesce().isnan(),
    "asked": lambda a, b: [a.is_sparse, a._nnz(), a.sparse_dim(), a.dense_dim(), a.is_coalesced(), a.dim(), a.numel()],
    "zeros": lambda a, b: torch.zeros_like(a),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("born", ["host", "device"])
@pytest.mark.parametrize("operation", ALONE.values(), ids=ALONE)
def test_operations_on_offload_alone(operation, born, inference):
    with torch.inference_mode(inference):
        outcome = same_parts(lambda d: operation(coo(d, born=born), coo(d, seed=4, born=born)))
    for value in outcome if isinstance(outcome, list) else [outcome]:
        assert not isinstance(value, torch.Tensor) or value.is_offload


BESIDE = {
    "mm": lambda sparse, x: torch.sparse.mm(sparse, x.t()),
    "mm transposed": lambda sparse, x: x @ sparse.t().to_dense(),
    "matmul": lambda sparse, x: sparse @ x.t(),
    "add": lambda sparse, x: x + sparse,
    "mul": lambda sparse, x: sparse.coalesce() * x,
    "mask": lambda sparse, x: x.sparse_mask(sparse.coalesce()),
    "in place": lambda sparse, x: x.clone().add_(sparse, alpha=-0.5),
    "sum": lambda sparse, x: sparse + x.to_sparse(),
    "copy": lambda sparse, x: x.to_sparse().copy_(sparse),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("operation", BESIDE.values(), ids=BESIDE)
def test_operations_beside_the_plain_device(operation, inference):
    with torch.inference_mode(inference):
        outcome = same_parts(lambda d: operation(coo(d), at(COMPUTE, 5, 4)))
        assert outcome.device.type == COMPUTE.type
        for part in [outcome._indices(), outcome._values()] if outcome.is_sparse else [outcome]:
            part.zero_()  # which is nobody else's memory
    assert_same(parts(coo(CPU)), parts(coo(OFFLOAD).cpu()))


def test_a_plain_operand_beside_dense_offload():
    same_parts(lambda d: coo(COMPUTE) @ at(d, 4, 3))
    assert_same((coo(CPU) @ at(OFFLOAD, 4, 3)).cpu(), coo(CPU) @ at(CPU, 4, 3))


GRADIENTS = {
    "mm": lambda sparse, x, y: torch.sparse.mm(sparse, x),
    "mm of a product": lambda sparse, x, y: torch.sparse.mm(sparse * 2, x * y),
    "sum": lambda sparse, x, y: torch.sparse.sum(sparse, 1).to_dense() * y[:, :1].sum(),
    "to_dense": lambda sparse, x, y: sparse.to_dense() @ x,
    "values": lambda sparse, x, y: sparse.coalesce().values() * x.sum(),
    "softmax": lambda sparse, x, y: torch.sparse.softmax(sparse, 1).to_dense() @ y,
}


@pytest.mark.parametrize("fed", [COMPUTE, OFFLOAD], ids=["fed with plain tensors", "fed with offload tensors"])
@pytest.mark.parametrize("function", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients(function, fed):
    def run(device):
        other = device if fed is OFFLOAD else COMPUTE
        sparse = coo(device).requires_grad_()
        x, y = at(other, 4, 3).requires_grad_(), at(device, 4, 3, seed=8).requires_grad_()
        result = function(sparse, x, y)
        result.square().sum().backward()
        assert sparse.grad.device == sparse.device
        assert x.grad is None or x.grad.device == x.device
        return [result, sparse.grad.to_dense(), sparse.grad.layout, x.grad, y.grad]

    same_parts(run)


def test_gradients_of_parts():
    def run(device):
        values = at(device, 3).requires_grad_()
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2], [1, 0, 1]], device=device), values, (3, 2))
        torch.sparse.mm(sparse, at(COMPUTE, 2, 4)).square().sum().backward()
        return values.grad

    assert same(run).is_offload


class Graph(nn.Module):
    """Two layers that pass messages along the edges of a graph, which is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", coo(CPU, shape=(6, 6), count=12))
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.second(torch.sparse.mm(self.edges, self.first(x)).relu()))


@pytest.mark.parametrize("fed", [COMPUTE, OFFLOAD], ids=["fed with plain tensors", "fed with offload tensors"])
def test_a_graph_network(fed):
    def run(device):
        net = Graph().to(device)
        out = net(at(device if fed is OFFLOAD else COMPUTE, 6, 4))
        out.square().mean().backward()
        return [out, *(parameter.grad for parameter in net.parameters())]

    same(run)


def test_a_graph_network_is_saved_and_copied():
    net = Graph().to(OFFLOAD)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["edges"].device == CPU
    other = Graph()
    other.edges = torch.zeros_like(other.edges)
    other.to(OFFLOAD).load_state_dict(state)
    for copied in (other, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert copied.edges.is_offload
        assert_same(parts(copied.edges), parts(net.edges))
        copied.edges._values().zero_()
    assert net.edges._values().cpu().abs().sum() > 0
    assert "layout=torch.sparse_coo" in repr(net.edges)
    assert "device='offload:0'" in repr(net.edges)


def test_a_file_opens_without_the_package(tmp_path):
    sparse = coo()
    torch.save({"sparse": sparse, "values": sparse._values()}, tmp_path / "sparse.pt")
    program = f"""
        import sys
        import torch
        state = torch.load({str(tmp_path / "sparse.pt")!r})
        assert "torch_offload" not in sys.modules
        state["values"].zero_()
        print(state["sparse"].layout, state["sparse"].device, state["sparse"]._values().abs().sum().item())
    """
    assert passes(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONWARNINGS="ignore") == "torch.sparse_coo cpu 0.0\n"
    loaded = torch.load(tmp_path / "sparse.pt", map_location="offload")
    assert loaded["sparse"].is_offload
    assert_same(parts(loaded["sparse"]), parts(sparse))


def test_copies():
    sparse = coo().requires_grad_()
    for copied in (copy.copy(sparse), copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse.detach()))):
        assert copied.is_offload
        assert_same(parts(copied.detach()), parts(sparse.detach()))


def test_traced():
    def traced():
        return make_fx(lambda sparse: (sparse * 2).to_dense(), tracing_mode="fake")(coo())

    says(
        NotImplementedError,
        "offload: a tensor of shape [5, 4] and layout torch.sparse_coo can't be traced on its way to or from offload; make it "
        "dense with .to_dense(), or keep the operation out of the graph.",
        traced,
    )


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp], ids=["grad", "vjp"])
def test_transforms(transform):
    def run(device):
        x = at(device, 4, 3)

        def loss(sparse):
            return torch.sparse.mm(sparse, x).square().sum()

        if transform is torch.func.grad:
            return transform(loss)(coo(device)).to_dense()
        value, backward = transform(loss, coo(device))
        return [value, backward(torch.tensor(2.0, device=device))[0].to_dense()]

    same(run)


@pytest.mark.parametrize("lower", LOW, ids=str)
def test_autocast(lower):
    def run(device):
        net = Graph().to(device)
        with torch.autocast(COMPUTE.type, lower):
            return net.second(net.edges.to_dense() @ net.first(at(COMPUTE, 6, 4)))

    same(run)


def test_a_sparse_parameter():
    def run(device):
        weight = nn.ParameterList([nn.Parameter(coo(CPU))]).to(device)[0]
        torch.sparse.mm(weight, at(COMPUTE, 4, 3)).square().sum().backward()
        return [weight.layout, weight.requires_grad, weight.grad.to_dense()]

    same(run)


def test_saved_on_the_host():
    def run(device):
        sparse, x = coo(device).requires_grad_(), at(COMPUTE, 4, 3).requires_grad_()
        with torch_offload.saved_tensors() if device == OFFLOAD else contextlib.nullcontext():
            torch.sparse.mm(sparse, x).square().sum().backward()
        return [sparse.grad.to_dense(), x.grad]

    same(run)


@pytest.mark.skipif(not CACHED, reason="nothing is fetched")
def test_the_parts_are_cached():
    sparse, x = coo(), at(COMPUTE, 4, 3)
    sparse @ x
    before = torch_offload.stats()
    sparse @ x
    after = torch_offload.stats()
    assert [after[name] - before[name] for name in ("fetches", "hits")] == [2, 2]


@pytest.mark.skipif(not GPU, reason="what has no kernel on the device is made on the host, and here it is the host")
def test_what_the_device_has_no_kernel_for():
    narrow = coo(dtype=torch.int32)
    assert_same(
        (narrow @ torch.ones(4, 2, dtype=torch.int32, device=OFFLOAD)).cpu(),
        coo(CPU, dtype=torch.int32) @ torch.ones(4, 2, dtype=torch.int32),
    )
