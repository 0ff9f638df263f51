"""Where a value is born and where work on it is done, as seen in the bytes that cross the link."""

import copy
import warnings

import pytest
import torch
from helpers import COMPUTE, CPU, HOST, OFFLOAD, SIM, assert_same, at
from torch import nn

import torch_offload


class Steps(torch.optim.Optimizer):
    def __init__(self, parameters, body):
        super().__init__(parameters, {})
        self.body = body

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.body(parameter)


def bytes_down(run):
    torch_offload.synchronize()
    before = torch_offload.memory_stats()["link.bytes_to_device"]
    run()
    return torch_offload.memory_stats()["link.bytes_to_device"] - before


def test_beside_a_cpu_tensor_no_bytes_are_copied():
    if SIM:
        pytest.skip("on the simulated link CPU tensors play CUDA's part")
    w, x = at(OFFLOAD, 4, 4), at(CPU, 4, 4)
    out = torch.zeros(4, 4)
    before = torch_offload.memory_stats()
    (w @ x).sum()
    torch.cat([w, x], out=torch.empty(8, 4))
    torch.mm(w, w, out=out)
    w.add_(x).mul_(2)
    x.add_(w)
    after = torch_offload.memory_stats()
    for key in ("link.bytes_to_device", "link.bytes_to_host", "host.allocations.total"):
        assert after[key] == before[key], key
    assert (w.device.type, x.device, out.device) == ("offload", CPU, CPU)


@pytest.mark.skipif(HOST, reason="there is no other place to be born")
@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_computed_stays_on_the_device(in_place):
    a = at(OFFLOAD, 64, 64)
    size = 64 * 64 * 4
    torch_offload.synchronize()
    before = torch_offload.memory_stats()
    y = a @ a  # fetches a
    after = torch_offload.memory_stats()
    assert after["link.bytes_to_device"] - before["link.bytes_to_device"] <= size + 256
    for _ in range(3):
        y = y @ y  # where it is
        y = y.t().clone()
        if in_place:
            y += 1
    last = torch_offload.memory_stats()
    assert last["link.bytes_to_device"] == after["link.bytes_to_device"]
    plain = at(COMPUTE, 64, 64)
    expected = plain @ plain
    for _ in range(3):
        expected = (expected @ expected).t().clone()
        if in_place:
            expected += 1
    assert_same(y, expected)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        h = self.inner(x)
        return x + h * torch.sigmoid(h)


@pytest.mark.skipif(HOST, reason="there is no link")
def test_a_model_fed_with_offload_tensors_sends_the_gradients_of_its_parameters_alone():
    """What its operations pass on, gradients that several of them share too, stays where it was made."""
    plain = nn.Sequential(*(Residual() for _ in range(4))).to(COMPUTE)
    net = copy.deepcopy(plain).to(OFFLOAD)
    x = at(COMPUTE, 8, 64)
    fed = x.to(OFFLOAD)
    for step in range(3):
        for model, given in ((plain, x), (net, fed)):
            model.zero_grad()
            torch_offload.synchronize()
            before = torch_offload.memory_stats()
            model(given).mul(2).sum().backward()
            torch_offload.synchronize()
        after = torch_offload.memory_stats()
        if step > 0 and torch_offload.get_budget() > 2**20:
            parameters = sum(p.nbytes for p in net.parameters())
            assert after["link.bytes_to_host"] - before["link.bytes_to_host"] == parameters
            # The gradient that backward begins with is one number.
            assert after["link.bytes_to_device"] - before["link.bytes_to_device"] <= 16
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert_same(ours.grad.cpu(), theirs.grad.cpu())


def test_movement_of_host_born_stays_on_the_host():
    a = at(OFFLOAD, 64, 64)
    torch_offload.synchronize()
    before = torch_offload.memory_stats()
    b = torch.cat([a, a]).clone()[::2].contiguous().double().to(torch.float32).t().flip(0)
    c = torch.stack([b, b]).index_select(0, torch.tensor([1], device=OFFLOAD))
    b[1:3] = 2
    b.add_(1).clamp_(-1, 1)
    after = torch_offload.memory_stats()
    assert after["link.bytes_to_device"] == before["link.bytes_to_device"]
    assert after["link.bytes_to_host"] == before["link.bytes_to_host"]
    assert c.device.type == "offload"
    a = at(CPU, 64, 64)
    expected = torch.cat([a, a]).clone()[::2].contiguous().double().to(torch.float32).t().flip(0)
    moved = torch.stack([expected, expected]).index_select(0, torch.tensor([1]))
    expected[1:3] = 2
    expected.add_(1).clamp_(-1, 1)
    assert_same([b, c], [expected, moved])


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_on_host_moves_nothing_down():
    a = at(OFFLOAD, 64, 64)
    before = torch_offload.memory_stats()["link.bytes_to_device"]
    with torch_offload.on_host():
        b = a @ a
        with torch_offload.on_host():
            b = b.exp()
        b = b + a
    assert torch_offload.memory_stats()["link.bytes_to_device"] == before
    c = b * 2
    assert torch_offload.memory_stats()["link.bytes_to_device"] > before
    a = at(CPU, 64, 64)
    expected = (a @ a).exp() + a
    assert_same([b, c], [expected, expected * 2])


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_on_host_ends_with_an_exception():
    a = at(OFFLOAD, 64, 64)
    with pytest.raises(ZeroDivisionError), torch_offload.on_host():
        raise ZeroDivisionError
    before = torch_offload.memory_stats()["link.bytes_to_device"]
    torch.matmul(a, a)
    assert torch_offload.memory_stats()["link.bytes_to_device"] > before


def test_on_host_does_not_move_mixed_operations():
    a, x = at(OFFLOAD, 4, 4), at(COMPUTE, 4, 4)
    with torch_offload.on_host():
        y = a @ x
    assert y.device == COMPUTE
    assert_same(y, a.to(COMPUTE) @ x)


def test_on_host_as_a_decorator():
    @torch_offload.on_host()
    def norm(w):
        return w.norm()

    assert_same(norm(at(OFFLOAD, 4, 4)), at(CPU, 4, 4).norm())
    assert_same(norm(at(OFFLOAD, 4, 4)), at(CPU, 4, 4).norm())


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_optimizer_steps_are_on_the_host():
    p = nn.Parameter(at(OFFLOAD, 64, 64))
    optimizer = Steps([p], lambda p: p.sub_(torch.exp(p) @ p))
    assert bytes_down(optimizer.step) == 0
    assert bytes_down(lambda: torch.exp(p.detach())) > 0
    p.grad = at(OFFLOAD, 64, 64)
    for make in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        for options in ({}, {"foreach": True}, {"foreach": False}):
            optimizer = make([p], **options)
            assert bytes_down(optimizer.step) == 0
            assert bytes_down(optimizer.step) == 0


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_optimizer_step_that_raises_ends_its_scope():
    p = nn.Parameter(at(OFFLOAD, 64, 64))
    optimizer = Steps([p], lambda p: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert bytes_down(lambda: p.detach() @ p.detach()) >= 0
        q = at(OFFLOAD, 64, 64)
        assert bytes_down(lambda q=q: q @ q) > 0


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_optimizer_step_that_raises_in_a_closure():
    p = nn.Parameter(at(OFFLOAD, 64, 64))
    p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)

    def closure():
        raise KeyError("in the closure")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    q = at(OFFLOAD, 64, 64)
    assert bytes_down(lambda: q @ q) > 0


def test_integer_matmul_falls_back_to_the_host():
    a = torch.arange(9, device=OFFLOAD).view(3, 3)
    assert_same(a @ a, torch.arange(9).view(3, 3) @ torch.arange(9).view(3, 3))
    assert (a @ a).device.type == "offload"


@pytest.mark.gpu
def test_a_host_fallback_writes_to_what_was_born_on_the_device():
    a = torch.arange(16, device=OFFLOAD).view(4, 4)
    out = a + a
    torch.mm(a, a, out=out)
    assert_same(out.to(COMPUTE), a.cpu() @ a.cpu())
    assert_same(out, a.cpu() @ a.cpu())


@pytest.mark.gpu
def test_host_fallbacks_are_counted():
    a = torch.arange(9, device=OFFLOAD).view(3, 3)
    before = torch_offload.stats()["host_fallbacks"]
    torch.mm(a, a)
    after = torch_offload.stats()["host_fallbacks"]
    assert after == before | {"aten::mm": before.get("aten::mm", 0) + 1}


@pytest.mark.gpu
def test_a_large_host_fallback_is_said_once():
    a = torch.ones(1500, 1500, dtype=torch.int64, device=OFFLOAD)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        a @ a
        a @ a
    (sentence,) = [str(warning.message) for warning in seen if "no CUDA kernel" in str(warning.message)]
    assert "its operands of 36000000 bytes" in sentence
