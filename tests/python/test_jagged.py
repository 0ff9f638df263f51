"""Jagged activations of the device that computes, beside weights on offload: values, gradients and memory."""

import pytest
import torch
import torch.nn.functional as F
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import CACHED, COMPUTE, OFFLOAD, at, same
from torch import nn

import torch_offload

WIDTH = 8


def jagged(*shape, requires_grad=False, seed=0):
    """Sequences of 3 and 5."""
    parts = [at(COMPUTE, length, *shape, seed=seed + length) for length in (3, 5)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad)


def attend(x, w):
    query, key, value = (F.linear(x, part).unflatten(-1, [2, WIDTH // 2]).transpose(1, 2) for part in w.split(WIDTH))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)


OPERATIONS = {
    "linear": lambda x, w, b: F.linear(x, w[:WIDTH], b),
    "a linear without a bias": lambda x, w, b: F.linear(x, w[:WIDTH]),
    "matmul": lambda x, w, b: x @ w.t(),
    "multiply": lambda x, w, b: x * b,
    "the other way round": lambda x, w, b: b - x,
    "in place": lambda x, w, b: (x * 2).add_(b),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (WIDTH,), w[0], b),
    "by a word": lambda x, w, b: torch.where(x > 0, b, x),
    "attention": lambda x, w, b: attend(x, w),
    "after another": lambda x, w, b: F.linear(F.gelu(F.linear(x, w[:WIDTH], b)), w[WIDTH : 2 * WIDTH]),
}


def step(function, device, **options):
    """Values, and the gradients of what is jagged and what is dense."""
    x = jagged(WIDTH, requires_grad=True)
    w, b = (at(device, *shape, seed=7).requires_grad_() for shape in ((3 * WIDTH, WIDTH), (WIDTH,)))
    y = function(x, w, b)
    assert y.is_nested
    assert y.device.type == COMPUTE.type
    y.values().square().sum().backward()
    for value in (w, b):
        assert value.grad is None or value.grad.device.type == device.type
    return y.values(), x.grad.values(), w.grad, b.grad


@pytest.mark.parametrize("operation", OPERATIONS)
def test_beside_offload(operation):
    same(lambda device: step(OPERATIONS[operation], device))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_beside_offload_compiled(operation, backend):
    if operation == "attention" and COMPUTE.type == "cpu":
        pytest.skip("PyTorch does not trace it for the CPU")
    same(lambda device: step(compiled(OPERATIONS[operation], backend), device))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_a_model(backend):
    def run(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, WIDTH)).to(device)
        optimizer = torch.optim.AdamW(net.parameters())
        call = net if backend is None else compiled(net, backend)
        for k in range(3):
            optimizer.zero_grad()
            call(jagged(WIDTH, seed=k)).values().square().sum().backward()
            optimizer.step()
        return [value.to(COMPUTE) for parameter in net.parameters() for value in (parameter.detach(), parameter.grad)]

    # A step over offload tensors is the CPU's, and may round a last bit otherwise.
    torch.testing.assert_close(run(OFFLOAD), run(COMPUTE), rtol=1e-4, atol=1e-5)


def test_looking_up():
    def run(device):
        rows = at(device, 10, WIDTH).requires_grad_()
        ids = torch.nested.nested_tensor(
            [torch.tensor(k, device=COMPUTE) for k in ([1, 2], [9, 1, 0])], layout=torch.jagged
        )
        y = F.embedding(ids, rows)
        y.values().square().sum().backward()
        return y.values(), rows.grad

    same(run)


def test_gradients_that_are_asked_for():
    def run(device):
        x, w = jagged(WIDTH), at(device, WIDTH, WIDTH).requires_grad_()
        y = F.linear(x, w * 2)
        (asked,) = torch.autograd.grad(y, w, torch.ones_like(y), retain_graph=True)
        y.backward(torch.ones_like(y), inputs=[w])
        assert {asked.device.type, w.grad.device.type} == {device.type}
        return asked, w.grad

    same(run)


def test_a_move_to_where_an_offload_tensor_is():
    x, w = jagged(WIDTH), at(OFFLOAD, 2)
    assert x.to(w).device.type == x.type_as(w).device.type == "offload"


@pytest.mark.skipif(not CACHED, reason="there is no cache")
def test_weights_are_not_kept_for_backward():
    layers, width = 12, 256
    net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(OFFLOAD)
    weight = 4 * width**2
    torch_offload.set_budget(0)
    ring = torch_offload.get_ring_bytes()
    torch_offload.set_ring_bytes(2 * weight)
    try:
        for _ in range(2):
            torch.offload.reset_peak_memory_stats()
            net(jagged(width)).values().sum().backward()
        peak = torch_offload.memory_stats()["device.slot_bytes.peak"]
    finally:
        torch_offload.set_ring_bytes(ring)
        torch_offload.set_budget("auto")
    assert 0 < peak <= layers * weight / 2, peak / weight
