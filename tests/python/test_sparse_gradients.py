"""Embeddings with ``sparse=True``: gradients of the rows that were looked up, and the optimizers that take them."""

import os
import re

import pytest
import torch
from helpers import COMPUTE, GPU, OFFLOAD, assert_same, same, says
from torch import nn

import torch_offload

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")

MODULES = {
    "Embedding": lambda: nn.Embedding(11, 4, sparse=True),
    "Embedding with padding": lambda: nn.Embedding(11, 4, sparse=True, padding_idx=2),
    "Embedding that renormalizes": lambda: nn.Embedding(11, 4, sparse=True, max_norm=1.0),
    "EmbeddingBag sum": lambda: nn.EmbeddingBag(11, 4, sparse=True, mode="sum"),
    "EmbeddingBag mean": lambda: nn.EmbeddingBag(11, 4, sparse=True, mode="mean"),
}
TOKENS = [[1, 2, 1], [5, 2, 10]]


def tokens(device, shift=0):
    return (torch.tensor(TOKENS) + shift).remainder(11).to(device)


def gradient_parts(parameter):
    gradient = parameter.grad
    assert gradient.layout is torch.sparse_coo
    assert gradient.device == parameter.device
    ordered = gradient.coalesce()
    return [gradient._nnz(), ordered.indices(), ordered.values()]


@pytest.mark.memcheck
@pytest.mark.parametrize("fed", [COMPUTE, OFFLOAD], ids=["fed with plain tensors", "fed with offload tensors"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_gradients(make, fed):
    def run(device):
        net = make().to(device)
        out = net(tokens(device if fed is OFFLOAD else COMPUTE))
        out.square().sum().backward()
        return [out, gradient_parts(net.weight)]

    same(run)


@pytest.mark.parametrize("make", [MODULES["Embedding"], MODULES["EmbeddingBag sum"]], ids=["Embedding", "EmbeddingBag"])
def test_gradients_accumulate(make):
    """Over micro-batches, and where one table is looked up twice."""

    def run(device):
        net = make().to(device)
        found = []
        for step in range(3):
            (net(tokens(COMPUTE, step)).square().sum() + net(tokens(COMPUTE, 3)).square().mean()).backward()
            found.append(gradient_parts(net.weight))
        return found

    same(run)


def test_a_gradient_that_is_also_dense():
    """Of a head that has the table's weight."""

    def run(device):
        net = nn.Embedding(7, 4, sparse=True).to(device)
        x = net(torch.tensor([1, 2, 1], device=COMPUTE))
        (nn.functional.linear(x, net.weight).square().sum()).backward()
        gradient = net.weight.grad
        net(torch.tensor([3], device=COMPUTE)).sum().backward()
        return [gradient.to_dense() if gradient.is_sparse else gradient, net.weight.grad.to_dense()]

    same(run)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
}


def trained(device, optimizer, stepped=None, to_none=True):
    """Forward and backward where the device computes; the optimizer's step where ``stepped`` says, or at home."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Flatten(1), nn.Identity()).to(device)
    parameters = list(net.parameters())
    own = [p.detach().to(stepped) for p in parameters] if stepped else parameters
    steps = optimizer(own)
    for step in range(4):
        for micro in range(2):
            net(tokens(COMPUTE, step + micro)).square().sum().backward()
        if stepped:
            for plain, parameter in zip(own, parameters, strict=True):
                plain.grad = parameter.grad.to(stepped)
        steps.step()
        if stepped:
            with torch.no_grad():
                for plain, parameter in zip(own, parameters, strict=True):
                    parameter.copy_(plain)
        for parameter in parameters:
            if to_none:
                parameter.grad = None
            else:
                parameter.grad.detach_()
                parameter.grad.zero_()
    return parameters


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(optimizer, to_none):
    """Forward and backward have the device's bits, and the step the CPU's."""
    expected = trained(COMPUTE, optimizer, torch.device("cpu"), to_none)
    actual = trained(OFFLOAD, optimizer, None, to_none)
    assert all(parameter.is_offload for parameter in actual)
    assert_same(actual, expected)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_that_takes_none(optimizer):
    net = nn.Embedding(11, 4, sparse=True).to(OFFLOAD)
    before = net.weight.detach().clone()
    net(tokens(COMPUTE)).sum().backward()
    plain = nn.Embedding(11, 4, sparse=True)
    plain(tokens("cpu")).sum().backward()
    with pytest.raises(RuntimeError) as expected:
        optimizer(plain.parameters()).step()
    says(RuntimeError, str(expected.value), optimizer(net.parameters()).step)
    assert_same(net.weight.detach(), before)


def test_hooks():
    net = nn.Embedding(11, 4, sparse=True).to(OFFLOAD)
    seen = []
    net.weight.register_hook(lambda g: seen.append((g.layout, g.device.type, g._nnz())))
    net.weight.register_hook(lambda g: g * 2)
    net.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.coalesce().values().sum().item()))
    net(torch.tensor([1, 2, 1], device=COMPUTE)).sum().backward()
    assert seen == [(torch.sparse_coo, "offload", 3), 24.0]


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_scaled(value):
    """With a GradScaler, which skips a step of a gradient that is not finite."""

    def run(device):
        net = nn.Embedding(11, 4, sparse=True).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(COMPUTE.type, init_scale=8.0)
        scaler.scale((net(tokens(COMPUTE)) * value).square().sum()).backward()
        scaler.unscale_(optimizer)
        found = gradient_parts(net.weight) if value == 1.0 else None
        before = net.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        return [found, scaler.get_scale(), torch.equal(net.weight.detach(), before)]

    same(run)


@pytest.mark.parametrize("foreach", [False, None])
def test_clipped(foreach):
    def run(device):
        net = nn.Embedding(11, 4, sparse=True).to(device)
        net(tokens(COMPUTE)).square().sum().backward()
        net.weight.grad = net.weight.grad.coalesce()
        norm = net.weight.grad.values().norm()
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.5, norm, foreach=foreach)
        return [norm, gradient_parts(net.weight)]

    same(run)


def test_a_user_makes_the_gradient():
    net = nn.Embedding(5, 2, sparse=True).to(OFFLOAD)
    net.weight.grad = torch.sparse_coo_tensor(torch.tensor([[3]]), torch.ones(1, 2), (5, 2), device=OFFLOAD)
    before = net.weight.detach().cpu()
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    before[3] -= 1
    assert_same(net.weight.detach(), before)


def test_autograd_grad():
    def run(device):
        net = nn.Embedding(11, 4, sparse=True).to(device)
        (gradient,) = torch.autograd.grad(net(tokens(COMPUTE)).square().sum(), net.weight)
        return [gradient.coalesce().indices(), gradient.coalesce().values()]

    same(run)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_compiled_graph_refuses(backend):
    net = nn.Embedding(11, 4, sparse=True).to(OFFLOAD)
    compiled = torch.compile(net, backend=backend)
    sentence = (
        "offload: the gradient of an offload tensor of shape [11, 4] is sparse, and a compiled graph can't make it; leave "
        "sparse=True out of nn.Embedding and nn.EmbeddingBag, or keep that module out of the graph with "
        "torch.compiler.disable()."
    )
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        compiled(tokens(COMPUTE)).square().sum().backward()
    assert net.weight.grad is None
    net(tokens(COMPUTE)).square().sum().backward()
    assert net.weight.grad.layout is torch.sparse_coo


@pytest.mark.skipif(
    not GPU or "TORCH_OFFLOAD_PINNED_LIMIT" in os.environ,
    reason="looks at the memory of the GPU, which reads no other memory",
)
def test_a_table_larger_than_what_the_gpu_may_use():
    """Neither the table nor a gradient of its size is on the GPU."""
    rows, width = 1 << 20, 64
    net = nn.Embedding(rows, width, sparse=True, device=OFFLOAD)
    optimizer = torch.optim.SparseAdam(net.parameters(), lr=0.1)
    torch_offload.set_budget(0)
    try:
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.max_memory_allocated()
        for step in range(3):
            net(torch.arange(step, step + 128, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        used = torch.cuda.max_memory_allocated() - start
    finally:
        torch_offload.set_budget("auto")
    assert used < rows * width * 4 // 8, used
