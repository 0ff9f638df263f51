"""Two devices over one host memory: each has its own cache, and compute follows the activations whatever device is current.

They are two GPUs, or two of the simulated link (``TORCH_OFFLOAD_LINK=sim TORCH_OFFLOAD_SIM_DEVICES=2``). There all activations
are on the CPU, and the first offload operand says whose cache an operation goes through.
"""

import contextlib
import os
import threading

import pytest
import torch
from helpers import GPU, assert_same, at, data, deterministic, layers
from torch.utils.checkpoint import checkpoint
from two_devices import HOMES, needs_two_devices, nothing_is_left  # noqa: F401

import torch_offload

pytestmark = needs_two_devices


TARGETS = [torch.device("cuda" if GPU else "cpu", index) for index in (0, 1)]  # of a fetch


COMPUTES = TARGETS if GPU else [torch.device("cpu")] * 2  # where its result is


PLENTY = 1 << 20


@contextlib.contextmanager
def current(index):
    """The device that is current is not asked where there is an operand to tell."""
    with torch.offload.device(index), torch.cuda.device(index) if GPU else contextlib.nullcontext():
        yield


def cached_by(home, target):
    """The index of the device whose cache an operation uses with activations on `target`."""
    return target if GPU else home


def count(name):
    """A counter, of each of both devices."""
    torch_offload.synchronize()
    return [torch_offload.memory_stats(index)[name] for index in (0, 1)]


def added(name, run):
    before = count(name)
    run()
    return [after - was for was, after in zip(before, count(name), strict=True)]


# ---- which device is meant


def test_operations():
    a, b = at(HOMES[1], 3, 3, seed=1), at(HOMES[0], 3, 3, seed=2)
    plain_a, plain_b = a.cpu(), b.cpu()
    for mine, other, plain, home in ((a, b, plain_a @ plain_b, HOMES[1]), (b, a, plain_b @ plain_a, HOMES[0])):
        assert (mine @ other).device == home
        torch.testing.assert_close((mine @ other).cpu(), plain)
        assert torch.mm(mine, mine, out=torch.empty_like(other)).device == other.device
        for compute in COMPUTES:
            result = mine.to(compute) @ other
            assert result.device == compute
            assert_same(result, mine.to(compute) @ other.to(compute))
    assert_same(torch.cat([a, b]).cpu(), torch.cat([plain_a, plain_b]))
    assert a.add_(b).device == HOMES[1]
    assert_same(a.cpu(), plain_a + plain_b)


# ---- what moves between them


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("born", ["host", "device"])
@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2]], ids=["whole", "transposed", "gaps"]
)
def test_copies_between_them(source, born, view):
    here, there = HOMES[source], HOMES[1 - source]
    value = at(here, 8, 8)
    value = value * 2 if born == "device" else value
    plain = view(value.cpu()).clone()
    value = view(value)
    assert value.to(here) is value
    moved = value.to(there, non_blocking=True)
    assert moved.device == there
    assert moved.stride() == plain.stride()
    value.zero_()
    assert_same(moved.cpu(), plain)
    assert_same((moved @ moved.t()).cpu(), (plain.to(COMPUTES[0]) @ plain.to(COMPUTES[0]).t()).cpu())
    assert_same(value.copy_(moved).cpu(), plain)
    assert_same(moved.to(here, torch.float64).cpu(), plain.double())
    expanded = torch.empty(2, *plain.shape, device=there).copy_(value)
    assert_same(expanded.cpu(), torch.stack([plain, plain]))


def test_a_copy_between_them_is_differentiable():
    w = at(HOMES[0], 4, 4).requires_grad_()
    plain = w.detach().cpu().requires_grad_()
    ((w * 3).to(HOMES[1]) * 5).sum().backward()
    (plain * 15).sum().backward()
    assert w.grad.device == HOMES[0]
    assert_same(w.grad.cpu(), plain.grad)


@pytest.mark.parametrize("source", [0, 1])
def test_what_is_newest_on_one_is_fetched_by_the_other(source):
    torch_offload.set_budget(PLENTY)
    a = at(HOMES[source], 16, 16)
    assert added("link.bytes_to_host", lambda: a @ a) == [0, 0]
    y = a @ a
    assert count("device.dirty_bytes.current")[source] == y.nbytes
    before = count("link.bytes_to_device")
    results = []
    home = added("link.bytes_to_host", lambda: results.append(torch.ops.offload.fetch(y, TARGETS[1 - source])))
    assert (home[source], home[1 - source]) == (y.nbytes, 0)
    down = [after - was for was, after in zip(before, count("link.bytes_to_device"), strict=True)]
    assert (down[source], down[1 - source]) == (0, y.nbytes)
    plain = a.to(COMPUTES[source])
    assert_same(results.pop(), plain @ plain)
    assert_same(y.cpu(), (plain @ plain).cpu())


def test_one_weight_on_both():
    """Cached on both devices and changed on the host, or by one of them: both see the change."""
    weight = data(64, 64).to(HOMES[0])
    plain = weight.cpu()
    for k in range(20):
        for target in TARGETS:
            assert_same(torch.ops.offload.fetch(weight, target).cpu(), plain)
        if k % 2:
            with torch_offload.on_host():
                weight += k
            plain += k
        else:
            fetched = data(64, 64, seed=k).to(COMPUTES[1])
            weight.copy_(fetched)
            plain.copy_(fetched)


# ---- two caches


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("target", [0, 1])
def test_statistics_are_of_one_device(home, target):
    torch_offload.set_budget(PLENTY)
    weight, x = at(HOMES[home], 64, 64), data(8, 64).to(COMPUTES[target])
    used = cached_by(home, target)
    expected = [0, 0]
    expected[used] = weight.nbytes
    with torch.no_grad():
        assert added("link.bytes_to_device", lambda: x @ weight) == expected
        assert count("device.slot_bytes.current") == expected
        expected[used] = 1
        for name in ("cache.fetches", "cache.hits"):
            assert added(name, lambda: x @ weight) == expected
    assert count("host.allocated_bytes.current")[0] == count("host.allocated_bytes.current")[1], "of all devices"
    torch.offload.reset_peak_memory_stats(1 - used)
    torch_offload.empty_cache()
    peaks = [0, 0]
    assert count("device.slot_bytes.current") == peaks
    peaks[used] = weight.nbytes
    assert [least <= peak for least, peak in zip(peaks, count("device.slot_bytes.peak"), strict=True)] == [True, True]
    assert count("device.slot_bytes.peak")[1 - used] == 0


def test_each_has_a_budget():
    """What stays on one takes no room of the other."""
    torch_offload.set_budget(64 * 64 * 4)
    assert [torch.offload.get_budget(home) for home in HOMES] == [64 * 64 * 4] * 2
    weights = [at(home, 64, 64, seed=k) for k, home in enumerate(HOMES)]
    fetched = [torch.ops.offload.fetch(w, target) for w, target in zip(weights, TARGETS, strict=True)]
    del fetched
    assert count("device.staying_bytes.current") == [64 * 64 * 4] * 2


@pytest.mark.skipif("TORCH_OFFLOAD_PINNED_LIMIT" in os.environ, reason="only page-locked memory is read in place")
def test_a_table_is_read_in_place_where_its_own_device_has_no_room():
    torch_offload.set_budget(2 * 16_384 * 64 * 4)
    tables = [[torch.nn.Embedding(16_384, 64, device=home) for _ in range(1 + 2 * k)] for k, home in enumerate(HOMES)]
    rows = torch.tensor([3, 16_000, 5])

    def look_up(index):
        with torch.no_grad():
            return [table(rows.to(COMPUTES[index])).cpu() for table in tables[index]]

    for index, expected in ((0, [0, 0]), (1, [0, 3])):
        look_up(index)  # before it nobody knows that these are parameters
        torch_offload.empty_cache()
        found = []
        assert added("cache.reads_in_place", lambda index=index, found=found: found.extend(look_up(index))) == expected
        assert_same(found, [table.weight.detach().cpu()[rows] for table in tables[index]])


def test_each_has_an_order_of_its_own():
    """One model on both, taking turns at every layer: each device knows its weights after a pass."""
    torch_offload.set_budget(PLENTY)
    nets = [layers(4, 32).to(home) for home in HOMES]

    def step():
        with torch.no_grad():
            both = [data(4, 32).to(compute) for compute in COMPUTES]
            for k in range(len(nets[0])):
                both = [net[k](x) for net, x in zip(nets, both, strict=True)]
        return both

    for _ in range(3):
        step()
    assert added("link.copies_to_device", step) == [0, 0]
    assert added("cache.hits", step) == [8, 8]
    for net, compute, result in zip(nets, COMPUTES, step(), strict=True):
        plain = layers(4, 32)
        plain.load_state_dict(net.state_dict())
        assert_same(result, plain.to(compute)(data(4, 32).to(compute)))


def test_synchronize_waits_for_both():
    a, b = (at(home, 64, 64) for home in HOMES)
    a, b = a @ a, b @ b
    for home in ("offload:0", "offload:1", 0, 1, None):
        torch.offload.synchronize(home)
    torch.offload.Stream(1).synchronize()
    assert torch.offload.current_stream(1).device == HOMES[1]
    assert_same(a.cpu(), b.cpu())


# ---- training


def step(net, x, index):
    with current(index):
        loss = net(x).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        torch.optim.SGD(net.parameters(), lr=0.25).step()
        gradients = [p.grad for p in net.parameters()]
        net.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("home", [0, 1])
def test_training(home, target, index):
    net = layers(6, 64).to(HOMES[home])
    plain = layers(6, 64)
    plain.load_state_dict(net.state_dict())
    plain.to(COMPUTES[target])
    before = count("cache.fetches")
    for k in range(4):
        x = data(32, 64, seed=k).to(COMPUTES[target])
        assert_same(step(net, x, index), step(plain, x, target))
    fetches = [after - was for was, after in zip(before, count("cache.fetches"), strict=True)]
    used = cached_by(home, target)
    assert fetches[used] > 0
    assert fetches[1 - used] == 0
    assert all(p.device == HOMES[home] for p in net.parameters())
    assert_same(list(net.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("homes", [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_across_both(homes, checkpointed):
    """Activations go from the one to the other between layers whose weights are on one offload device, or on two."""
    first, second = (layers(2, 64).to(HOMES[home]) for home in homes)
    plain_first, plain_second = layers(2, 64), layers(2, 64)
    plain_first.load_state_dict(first.state_dict())
    plain_second.load_state_dict(second.state_dict())
    plain_first.to(COMPUTES[0])
    plain_second.to(COMPUTES[1])
    for k in range(5):
        x = data(32, 64, seed=k).to(COMPUTES[0])
        results = []
        for a, b in ((first, second), (plain_first, plain_second)):
            middle = checkpoint(a, x, use_reentrant=False) if checkpointed else a(x)
            loss = b(middle.to(COMPUTES[1])).square().mean()
            loss.backward()
            results.append([loss.detach(), *[p.grad.cpu() for p in (*a.parameters(), *b.parameters())]])
            a.zero_grad()
            b.zero_grad()
        assert_same(results[0], results[1])


def test_gradients_of_weights_on_both():
    """An operation may save weights of both. Their gradients go home, each to its own."""
    weights = [at(home, 8, 8, seed=k).requires_grad_() for k, home in enumerate(HOMES)]
    plain = [w.detach().to(COMPUTES[1]).requires_grad_() for w in weights]
    x = data(8, 8).to(COMPUTES[1])

    def run(first, second):
        hidden = x * second * first
        return (hidden @ first + hidden @ second).square().mean()

    with deterministic():
        loss = run(*weights)
        loss.backward()
        expected = run(*plain)
        expected.backward()
    assert_same(loss.detach(), expected.detach())
    for weight, home, other in zip(weights, HOMES, plain, strict=True):
        assert weight.grad.device == home
        assert_same(weight.grad.cpu(), other.grad.cpu())


def test_backward_fetches_to_where_forward_did():
    torch_offload.set_budget(PLENTY)
    a, b = (at(home, 8, 8, seed=k).requires_grad_() for k, home in enumerate(HOMES))

    def forward_and_backward():
        (b @ a).sum().backward()  # computed where b is

    assert added("cache.fetches", forward_and_backward)[0] == 0
    torch.testing.assert_close(a.grad.cpu(), b.detach().cpu().t() @ torch.ones(8, 8))
    torch.testing.assert_close(b.grad.cpu(), torch.ones(8, 8) @ a.detach().cpu().t())


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counter):
        counter.add_(1)
        return x * counter

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_what_a_users_function_writes_comes_home():
    for index, (home, compute) in enumerate(zip(HOMES, COMPUTES, strict=True)):
        counter, x = torch.ones(4, device=home), torch.ones(4, device=compute)
        expected = [0, 0]
        expected[index] = counter.nbytes
        assert added("link.bytes_to_host", lambda x=x, counter=counter: Counts.apply(x, counter)) == expected
        assert_same(Counts.apply(x, counter).cpu(), torch.full((4,), 3.0))
        assert_same(counter.cpu(), torch.full((4,), 3.0))


class Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *others):
        return x + sum(others)


@pytest.mark.parametrize("run", [Adds.apply, torch.addcmul])
def test_operands_on_both_go_to_one(run):
    values = [torch.ones(4, device=home) for home in HOMES]
    for index in (0, 1):
        x, expected = torch.ones(4, device=COMPUTES[index]), [0, 0]
        expected[index] = 2
        assert added("cache.fetches", lambda x=x, k=index: run(x, values[k], values[1 - k])) == expected


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def trained(name, homes):
    nets = [layers(2, 16).to(home) for home in homes]
    for k, net in enumerate(nets):
        net.load_state_dict({key: at("cpu", *value.shape, seed=k) for key, value in net.state_dict().items()})
    parameters = [p for net in nets for p in net.parameters()]
    optimizer = OPTIMIZERS[name](parameters)
    for k in range(4):
        x = data(8, 16, seed=k)
        nets[1](nets[0](x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=k % 2 == 0)
    return parameters, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_over_both(name):
    """The bits of the same with all parameters on one device, and its state beside each parameter."""
    parameters, optimizer = trained(name, HOMES)
    expected, other = trained(name, [HOMES[0], HOMES[0]])
    assert {p.device for p in parameters} == set(HOMES)
    assert_same(list(parameters), list(expected))
    for p, q in zip(parameters, expected, strict=True):
        state = optimizer.state[p]
        assert {value.device for value in state.values() if torch.is_tensor(value) and value.dim()} == {p.device}
        assert_same(dict(state), dict(other.state[q]))


def test_gradients_on_both_are_clipped():
    parameters = [torch.zeros(4, device=home).requires_grad_() for home in HOMES]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    assert torch.nn.utils.clip_grad_norm_(parameters, 1.0).item() == 10.0
    for parameter, home, value in zip(parameters, HOMES, (0.3, 0.4), strict=True):
        assert parameter.grad.device == home
        torch.testing.assert_close(parameter.grad.cpu(), torch.full((4,), value))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("index", [0, 1])
def test_sparse_tensors_and_gradients(index):
    home, compute = HOMES[index], COMPUTES[index]
    with current(1 - index):
        sparse = torch.eye(3).to_sparse().to(home)
        assert {sparse.device, sparse._indices().device, sparse._values().device, (sparse * 2).device} == {home}
        assert_same((sparse @ at(compute, 3, 2)), at("cpu", 3, 2))
        table = torch.nn.Embedding(5, 2, sparse=True, device=home)
        before = table.weight.detach().cpu()
        table(torch.tensor([3], device=compute)).sum().backward()
        assert {table.weight.grad.device, table.weight.grad._values().device} == {home}
        torch.optim.SGD(table.parameters(), lr=1.0).step()
    before[3] -= 1
    assert_same(table.weight.detach(), before)
