"""The cache's budget: what stays on the GPU moves once, what is newer there goes home when it is due, and no value changes."""

import copy
import gc

import pytest
import torch
from helpers import CACHED, COMPUTE, OFFLOAD, SIM, assert_same, at, data, deterministic, grads, layers, passes

import torch_offload

pytestmark = pytest.mark.skipif(not CACHED, reason="there is no cache")

WIDTH = 64
WEIGHT = WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def nothing_else_is_cached():
    before = torch_offload.get_ring_bytes()
    gc.collect()
    torch_offload.empty_cache()
    yield
    torch_offload.set_ring_bytes(before)
    torch_offload.set_budget("auto")


def moved(action):
    """Bytes to the device and home that ``action()`` makes; what the host still has to do for it belongs to it."""
    torch_offload.synchronize()
    before = torch_offload.memory_stats()
    action()
    torch_offload.synchronize()
    after = torch_offload.memory_stats()
    return tuple(after[key] - before[key] for key in ("link.bytes_to_device", "link.bytes_to_host"))


def training(net, inputs, optimizer):
    losses = []
    for batch in inputs:
        optimizer.zero_grad()
        for x in batch:
            loss = net(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return losses


@pytest.mark.memcheck
@pytest.mark.parametrize("budget", [0, 3 * WEIGHT, 20 * WEIGHT, "auto"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_no_budget_changes_a_value(budget, micro_batches, feed):
    torch_offload.set_ring_bytes(2 * WEIGHT)
    torch_offload.set_budget(budget)
    net = layers(6, WIDTH).to(OFFLOAD)
    plain = copy.deepcopy(net).to(COMPUTE)
    place = COMPUTE if feed == "plain" else OFFLOAD
    inputs = [[data(16, WIDTH, seed=9 * k + j) for j in range(micro_batches)] for k in range(4)]
    with deterministic():
        expected = training(plain, inputs, torch.optim.SGD(plain.parameters(), lr=0.25))
        fed = [[x.to(place) for x in batch] for batch in inputs]
        actual = training(net, fed, torch.optim.SGD(net.parameters(), lr=0.25))
    assert_same(actual, expected)
    assert_same(grads(net), grads(plain))
    assert_same(list(net.parameters()), list(plain.parameters()))


def counts():
    torch_offload.synchronize()
    stats = torch_offload.memory_stats()
    return stats["device.staying_bytes.current"], stats["cache.evictions"]


@pytest.mark.parametrize("as_share", [False, True])
def test_a_budget_that_shrinks_gives_back_and_changes_no_value(as_share):
    """A model trains while what stays of it is given up step by step, and comes back. The plain device has the same bits."""
    torch_offload.set_ring_bytes(2 * WEIGHT)
    net = layers(12, WIDTH).to(OFFLOAD)
    plain = copy.deepcopy(net).to(COMPUTE)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.25) for model in (net, plain)]
    x = data(16, WIDTH)
    stayed = []
    with deterministic():
        for step, fit in enumerate([40, 8, 4, 2, 0, 40, 2]):
            budget = fit * WEIGHT
            before, evictions = counts()
            torch_offload.set_budget(f"{100 * budget / device_bytes():.8f}%" if as_share else budget)
            assert abs(torch_offload.get_budget() - budget) <= 2**10
            after, now = counts()
            if stayed and before > budget:
                assert after <= torch_offload.get_budget()
                assert now > evictions, "and it was by giving up what stayed"
            batch = [[data(16, WIDTH, seed=10 * step + k)] for k in range(2)]
            ours, theirs = (training(model, batch, o) for model, o in zip((net, plain), optimizers, strict=True))
            assert_same(ours, theirs)
            assert_same(grads(net), grads(plain))
            with torch.no_grad():
                for _ in range(3):  # as many passes as it takes to know what stays
                    assert_same(net(x), plain(x))
            stayed.append(counts()[0])
            assert stayed[-1] <= torch_offload.get_budget()
    assert_same(list(net.parameters()), list(plain.parameters()))
    assert stayed[0] >= 12 * WEIGHT
    assert stayed[0] == stayed[5], "all of it came back"
    assert stayed[0] > stayed[1] > stayed[2] > stayed[3] > stayed[4] == 0
    assert stayed[3] == stayed[6]


def test_weights_that_fit_move_once():
    torch_offload.set_budget(64 * WEIGHT)
    net = layers(6, WIDTH).to(OFFLOAD)
    x = data(16, WIDTH)
    with torch.no_grad():
        first, _ = moved(lambda: net(x))
        assert first >= 6 * WEIGHT
        assert moved(lambda: [net(x) for _ in range(3)]) == (0, 0)


def test_a_step_makes_them_move_once_more():
    torch_offload.set_budget(64 * WEIGHT)
    net = layers(6, WIDTH).to(OFFLOAD)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    size = sum(p.nbytes for p in net.parameters())
    x = data(16, WIDTH)
    training(net, [[x]] * 6, optimizer)
    down, up = moved(lambda: training(net, [[x]] * 4, optimizer))
    assert 4 * size <= down <= 4.1 * size  # a step's end has the first ones of the next come
    assert up == 4 * size


def test_gradients_of_many_micro_batches_go_home_once():
    torch_offload.set_budget(64 * WEIGHT)
    net = layers(6, WIDTH).to(OFFLOAD)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    batch = [data(16, WIDTH, seed=k) for k in range(4)]
    training(net, [batch] * 6, optimizer)
    down, up = moved(lambda: training(net, [batch] * 4, optimizer))
    size = sum(p.nbytes for p in net.parameters())
    assert up == 4 * size
    assert 4 * size <= down <= 4.1 * size, "gradients are read by nobody"


def test_gradients_of_a_weight_that_is_used_twice_go_home_once_and_in_backward():
    torch_offload.set_budget(64 * WEIGHT)
    net = layers(6, WIDTH).to(OFFLOAD)
    net[4].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    size = sum(p.nbytes for p in net.parameters())
    x = data(16, WIDTH)
    for step in range(3):
        optimizer.zero_grad()
        _, backward = moved(lambda: net(x).square().sum().backward())
        _, rest = moved(optimizer.step)
        if step > 0:
            assert (backward, rest) == (size, 0)


def test_gradients_that_nobody_has_read_go_home_at_each_addition():
    torch_offload.set_budget(64 * WEIGHT)
    net = layers(6, WIDTH).to(OFFLOAD)
    size = sum(p.nbytes for p in net.parameters())
    x = data(16, WIDTH)
    trips = [moved(lambda: net(x).square().sum().backward())[1] / size for _ in range(4)]
    assert trips == [1, 1, 1, 1]  # nobody has read any: each addition may have been the last


def test_without_a_budget_what_is_added_to_a_gradient_does_not_travel():
    torch_offload.set_budget(0)
    net = layers(6, WIDTH).to(OFFLOAD)
    size, weights = (sum(p.nbytes for p in which) for which in (net.parameters(), [layer.weight for layer in net[::2]]))
    x = data(16, WIDTH)
    trips = [moved(lambda: net(x).square().sum().backward()) for _ in range(4)]
    assert [up for _, up in trips] == [size] * 4
    # Forward fetches all, backward the weights of all layers but the first, and each addition the sum so far. What a pass ends
    # with, the next one may find.
    for down, _ in trips[1:]:
        assert down <= size + weights + size


def test_gradients_of_activations_on_offload_never_leave():
    torch_offload.set_budget(64 * WEIGHT)
    net = layers(6, WIDTH).to(OFFLOAD)
    x = data(16, WIDTH).to(OFFLOAD)
    for _ in range(2):
        net.zero_grad()
        _, up = moved(lambda: net(x).square().sum().backward())
        assert up == sum(p.nbytes for p in net.parameters())


def test_results_that_the_host_does_not_read_never_leave():
    torch_offload.set_budget(64 * WEIGHT)
    net = layers(6, WIDTH).to(OFFLOAD)
    x = data(16, WIDTH).to(OFFLOAD)
    with torch.no_grad():
        net(x)
        down, up = moved(lambda: net(x))
        assert (down, up) == (0, 0)
        y = net(x)
        assert_same(y, copy.deepcopy(net).to(COMPUTE)(x.to(COMPUTE)))


def test_a_budget_of_nothing_writes_through():
    torch_offload.set_budget(0)
    a = data(WIDTH, WIDTH).to(OFFLOAD)
    assert moved(lambda: a @ a)[1] == WEIGHT
    assert torch_offload.memory_stats()["device.dirty_bytes.current"] == 0


def test_results_wait_in_the_ring_where_a_budget_has_no_room():
    torch_offload.set_ring_bytes(16 * WEIGHT)
    torch_offload.set_budget(1)
    a = data(WIDTH, WIDTH).to(OFFLOAD)

    def chain():
        x = a
        for _ in range(10):
            x = x @ a
        return x

    assert moved(chain)[1] == 0
    plain = a.to(COMPUTE)
    expected = plain
    for _ in range(10):
        expected = expected @ plain
    assert_same(chain(), expected)


def test_what_is_newer_on_the_device_is_saved(tmp_path):
    torch_offload.set_budget(64 * WEIGHT)
    a = data(WIDTH, WIDTH).to(OFFLOAD)
    product = a @ a
    assert torch_offload.memory_stats()["device.dirty_bytes.current"] >= WEIGHT
    expected = a.to(COMPUTE) @ a.to(COMPUTE)
    torch.save(product, tmp_path / "product.pt")
    assert_same(torch.load(tmp_path / "product.pt"), expected)
    assert_same(copy.deepcopy(product), expected)
    product[1:3] = 5
    expected[1:3] = 5
    assert_same(product, expected)
    assert product.numpy(force=True).sum() == product.cpu().numpy().sum()


def test_partial_writes_to_what_is_newer_on_the_device():
    torch_offload.set_budget(64 * WEIGHT)
    a = at(COMPUTE, WIDTH, WIDTH)
    product, expected = a.to(OFFLOAD) @ a.to(OFFLOAD), a @ a
    product[3].copy_(a[0])
    expected[3].copy_(a[0])
    product[:, 5].copy_(a[:, 1])
    expected[:, 5].copy_(a[:, 1])
    assert_same(product, expected)
    assert_same(product.to(COMPUTE), expected)


@pytest.mark.parametrize("budget", ["", "half", "1e3", "150%", "-1%", "nan%", "%", " 40%", "40  %", str(1 << 63)])
def test_what_is_no_budget(budget):
    torch_offload.set_budget(12345)
    with pytest.raises(ValueError, match="a budget is"):
        torch_offload.set_budget(budget)
    assert torch_offload.get_budget() == 12345


def device_bytes():
    return 8 << 30 if SIM else torch.cuda.get_device_properties(0).total_memory


SHARES = {"100%": 1.0, "50%": 0.5, "40%": 0.4, "12.5 %": 0.125, "0%": 0.0}


@pytest.mark.parametrize("text", SHARES)
def test_a_share_of_the_device(text):
    torch_offload.set_budget(text)
    assert torch_offload.get_budget() == int(SHARES[text] * device_bytes())


@pytest.mark.parametrize(("text", "count"), [("4096", 4096), *SHARES.items()])
def test_the_environment_takes_what_a_call_takes(text, count):
    out = passes(
        """
        import torch, torch_offload
        w = torch.ones(3, 3, device="offload")
        w @ w
        print(torch_offload.get_budget())
        """,
        TORCH_OFFLOAD_BUDGET=text,
    )
    assert int(out) == (count if isinstance(count, int) else int(count * device_bytes()))
    torch_offload.set_budget(text)
    assert torch_offload.get_budget() == int(out)


def test_settings():
    torch_offload.set_budget(12345)
    assert torch_offload.get_budget() == 12345
    torch_offload.set_budget("auto")
    assert torch_offload.get_budget() > 12345


@pytest.mark.parametrize("call", ["get_budget()", "memory_summary()"])
def test_an_automatic_budget_is_known_before_the_first_fetch(call):
    out = passes(
        f"""
        import torch, torch_offload
        from torch_offload import _C
        print(_C.in_use(), torch.cuda.is_initialized())
        torch_offload.memory_stats()
        torch_offload.empty_cache()
        print(_C.in_use(), torch.cuda.is_initialized())
        torch_offload.{call}
        before = torch_offload.get_budget()
        w = torch.ones(300, 300, device="offload")
        torch.ones(300, device="{COMPUTE}") @ w
        print(before, torch_offload.get_budget())
        """
    )
    unused, still, budgets = out.splitlines()
    assert unused == still == "False False"
    before, after = map(int, budgets.split())
    assert before > 0.2 * device_bytes()
    assert abs(after - before) <= 64 << 20


def layer_by_layer(net, x):
    """What the plain device makes of it, with one layer there at a time."""
    for layer in net:
        x = copy.deepcopy(layer).to(COMPUTE)(x)
    torch.cuda.empty_cache()
    return x


def filled(free):
    """Takes all but ``free`` bytes of the GPU."""
    torch.cuda.empty_cache()
    return torch.empty(torch.cuda.mem_get_info()[0] - free, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_an_automatic_budget_gives_way():
    """Another tensor takes what the model leaves, and then what it could do with: no out-of-memory, and the model goes on."""
    width = 4096
    net = layers(64, width).to(OFFLOAD)  # 4.3 GB
    x = data(16, width)
    size = sum(p.nbytes for p in net.parameters())
    with torch.no_grad():
        y = layer_by_layer(net, x)
        for _ in range(3):
            assert_same(net(x), y)
        assert moved(lambda: net(x)) == (0, 0), "all of it stays"
        headroom = 4 << 30
        others = [filled(size // 2 + headroom)]
        for _ in range(4):
            assert_same(net(x), y)
        assert moved(lambda: net(x)) == (0, 0), "there is room for all of it still"
        _, evictions = counts()
        others.append(filled(headroom - size // 2))
        for _ in range(20):  # as long as another request like that one is expected
            assert_same(net(x), y)
        assert counts()[1] > evictions, "some of it was given back"
        down, _ = moved(lambda: net(x))
        assert 0 < down < size
        del others
        torch.cuda.empty_cache()
        for _ in range(20):
            assert_same(net(x), y)
        assert moved(lambda: net(x)) == (0, 0), "and comes back"


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_request_that_needs_what_stays():
    width = 4096
    net = layers(64, width).to(OFFLOAD)
    x = data(16, width)
    with torch.no_grad():
        y = layer_by_layer(net, x)
        for _ in range(3):
            assert_same(net(x), y)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        stayed, evictions = counts()
        assert stayed > 4 << 30
        big = [torch.empty(free - (8 << 30), dtype=torch.uint8, device="cuda")]
        # More than is free: only what stays can make room.
        for _ in range(10):
            big.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
        assert counts()[1] > evictions
        assert counts()[0] < stayed
        assert_same(net(x), y)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_the_first_request_of_more_than_is_free():
    """It takes all that is free, which is most of the GPU, and a half of what stays: the driver alone knows what is missing."""
    width = 4096
    net = layers(64, width).to(OFFLOAD)
    x = data(16, width)
    with torch.no_grad():
        y = layer_by_layer(net, x)
        for _ in range(20):  # a long time in which the allocator asks for nothing
            assert_same(net(x), y)
        torch.cuda.empty_cache()
        stayed, evictions = counts()
        assert stayed > 4 << 30
        big = torch.empty(torch.cuda.mem_get_info()[0] + (2 << 30), dtype=torch.uint8, device="cuda")
        assert counts()[1] > evictions
        assert_same(net(x), y)
        assert counts()[0] < stayed, "what it takes is not to be had"
        del big
        torch.cuda.empty_cache()
        for _ in range(20):
            assert_same(net(x), y)
        assert moved(lambda: net(x)) == (0, 0), "and comes back"


@pytest.mark.gpu
def test_an_automatic_budget_is_of_a_fraction_of_the_device():
    total, net, x = torch.cuda.get_device_properties(0).total_memory, layers(2, WIDTH).to(OFFLOAD), data(4, WIDTH)
    for _ in range(20):  # as long as what the allocator has asked for is remembered
        net(x)
    torch_offload.empty_cache()
    free = 3 << 30
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + free) / total)
    try:
        torch_offload.set_budget("auto")  # looks now
        assert free * 3 / 4 < torch_offload.get_budget() <= free
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_within_a_fraction_of_the_device():
    """A model three times what the process may take trains, with shapes that change, and nothing grows; bits as without."""
    total = torch.cuda.get_device_properties(0).total_memory
    width = 2048
    net = layers(48, width).to(OFFLOAD)  # 0.8 GB
    size = sum(p.nbytes for p in net.parameters())
    batches = [[[data(16 * (1 + step % 3), width, seed=step)]] for step in range(30)]
    plain = copy.deepcopy(net).to(COMPUTE)
    with deterministic():
        optimizer = torch.optim.SGD(plain.parameters(), lr=2**-10)
        expected = [training(plain, batch, optimizer) for batch in batches]
    trained = [parameter.detach().cpu() for parameter in plain.parameters()]
    del plain, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    torch_offload.empty_cache()
    torch_offload.set_ring_bytes(64 << 20)
    limit = torch.cuda.memory_reserved() + size // 3
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        optimizer = torch.optim.SGD(net.parameters(), lr=2**-10)
        peaks = []
        _, evictions = counts()
        torch.offload.reset_peak_memory_stats()
        for batch, losses in zip(batches, expected, strict=True):
            with deterministic():
                assert_same(training(net, batch, optimizer), losses)
            peaks.append((torch.cuda.memory_reserved(), torch_offload.memory_stats()["host.reserved_bytes.current"]))
        assert torch_offload.memory_stats()["device.slot_bytes.peak"] > 64 << 20, "more than the ring was held"
        assert counts()[1] - evictions > 29 * len(trained), "and given back: each weight in every step"
        assert_same(list(net.parameters()), trained)
        assert peaks[-1][1] == peaks[9][1]
        assert max(reserved for reserved, _ in peaks) <= limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
