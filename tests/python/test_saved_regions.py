"""``torch_offload.saved_tensors``: its options, modules by name, nesting, and what is left of it afterwards."""

import contextlib
import os
import warnings

import pytest
import torch
from helpers import COMPUTE, GPU, OFFLOAD, assert_same, at, data, grads, layers, says
from saving import both_ways, cached, everything, held, sent_home, stats
from torch import nn

import torch_offload
from torch_offload import keep_saved_tensors, saved_tensors


@cached
def test_the_innermost_region_decides():
    x = data(32, 64).requires_grad_()
    before, big = sent_home(), 32 * 64 * 4
    with everything():
        y = x.exp().exp()
        with keep_saved_tensors():
            y = y.exp().exp().exp()
            y = y * 1
        assert sent_home() - before == big  # which was saved outside
        y = y.exp().exp().sin()
    assert sent_home() - before > 2 * big
    y.sum().backward()
    z = x.detach().requires_grad_()
    z.exp().exp().exp().exp().exp().exp().exp().sin().sum().backward()
    assert_same(x.grad, z.grad)


@cached
def test_a_region_for_each_layer_is_as_good_as_one_for_all():
    x, seen = data(32, 64).requires_grad_(), []

    def run(regions):
        before, x.grad = sent_home(), None
        y = x
        for region in regions:
            with region:
                y = y.sigmoid()  # is let go of when the next region has begun
        y = y.sum()
        sent = sent_home() - before
        torch_offload.empty_cache()
        prefetched, fetched = stats("cache.prefetches"), stats("link.bytes_to_device")
        y.backward()
        seen.append((sent, stats("cache.prefetches") - prefetched, stats("link.bytes_to_device") - fetched))
        return x.grad

    one = everything()
    assert_same(run([everything() for _ in range(12)]), run([one] * 12))
    assert seen[0] == seen[1]
    assert seen[0][0] == seen[0][2] >= 10 * 32 * 64 * 4
    assert seen[0][1] >= 8


@cached
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="every fetch is a copy of its own")
@pytest.mark.parametrize("weights", [0, 3, 9])
def test_offload_weights_in_between_do_not_end_what_is_fetched_ahead(weights):
    x, big = data(32, 64).requires_grad_(), 32 * 64 * 4
    factors = [[at(OFFLOAD, 32, 64, seed=i * weights + k) for k in range(weights)] for i in range(12)]
    ring = torch_offload.get_ring_bytes()
    try:
        torch_offload.set_ring_bytes(2 * big)
        torch_offload.set_budget(0)
        before = sent_home()
        with everything():
            y = x
            for layer in factors:
                y = y.sigmoid()
                for factor in layer:
                    y = y * factor
            y = y.sum()
        sent = sent_home() - before
        torch_offload.empty_cache()
        fetched = stats("link.bytes_to_device")
        y.backward()
        assert stats("link.bytes_to_device") - fetched <= sent + 12 * weights * big
    finally:
        torch_offload.set_ring_bytes(ring)
        torch_offload.set_budget(os.environ.get("TORCH_OFFLOAD_BUDGET") or "auto")


@cached
def test_a_graph_that_is_kept_takes_no_room_from_another_one():
    def graph():
        y = data(64, 64).requires_grad_()
        with everything():
            for _ in range(24):
                y = y.sigmoid()
            return y.sum()

    def prefetched(graph):
        torch_offload.empty_cache()
        before = stats("cache.prefetches")
        graph.backward()
        return stats("cache.prefetches") - before

    ring = torch_offload.get_ring_bytes()
    try:
        torch_offload.set_ring_bytes(8 * 64 * 64 * 4)
        alone = prefetched(graph())
        kept = graph()
        beside = [prefetched(graph()) for _ in range(4)]
    finally:
        torch_offload.set_ring_bytes(ring)
    assert alone > 15
    assert min(beside) >= alone
    kept.backward()


@cached
def test_what_two_regions_save_travels_once():
    x = data(32, 64).requires_grad_()
    before, big = sent_home(), 32 * 64 * 4
    with everything():
        y = x.exp()
    with everything():
        z = y.sin()
        del y
        z = z.sum() + x.square().sum()
    assert sent_home() - before == big
    torch_offload.empty_cache()
    fetched = stats("link.bytes_to_device")
    z.backward()
    if "TORCH_OFFLOAD_EVICT" not in os.environ:  # which leaves nothing for the next one who asks
        assert stats("link.bytes_to_device") - fetched == big
    assert_same(x.grad, 2 * x.detach() + x.detach().exp().cos() * x.detach().exp())


@cached
def test_options():
    x = data(32, 64).requires_grad_()
    big, asked = 32 * 64 * 4, []

    def sent(**options):
        before = sent_home()
        with saved_tensors(**options):
            y = x.exp().sin().cos().exp().sum().exp()
        gone = sent_home() - before
        y.backward()
        return gone

    def only_complex(tensor):
        asked.append(tensor.shape)
        return tensor.is_complex()

    assert sent(min_bytes=big + 1) == 0
    assert sent(min_bytes=big) >= 3 * big
    assert sent(min_bytes=0, keep_bytes=2 * big) == sent(min_bytes=0) - 2 * big
    assert sent(min_bytes=0, keep_bytes=100 * big) == 0
    assert sent(min_bytes=0, filter=only_complex) == 0
    assert len(asked) >= 4
    assert asked[0] == (32, 64)
    with pytest.warns(
        UserWarning, match=f"stay on the device: those on the host may take {big} bytes, and take {big} now"
    ):
        assert sent(min_bytes=0, max_host_bytes=big) == big
    says(ValueError, "offload: min_bytes is -1; give bytes, 0 or more.", lambda: saved_tensors(min_bytes=-1))
    says(ValueError, "offload: keep_bytes is -2; give bytes, 0 or more.", lambda: saved_tensors(keep_bytes=-2))
    says(
        ValueError, "offload: in_flight_bytes is -1; give bytes, 0 or more.", lambda: saved_tensors(in_flight_bytes=-1)
    )
    with pytest.raises(ZeroDivisionError), everything(filter=lambda t: 1 / 0):
        x.exp()
    assert sent(min_bytes=0) >= 3 * big  # nothing is left of the failure


@cached
def test_what_is_held_does_not_count():
    x, weight = data(32, 64).requires_grad_(), data(64, 64)
    big = 32 * 64 * 4

    def sent(**options):
        before = sent_home()
        with saved_tensors(min_bytes=0, **options):
            y = (x @ weight).exp().sin().cos().exp().sum().exp()
        gone = sent_home() - before
        y.backward()
        return gone

    everywhere = sent()
    assert sent(keep_bytes=2 * big) == everywhere - 2 * big
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sent(max_host_bytes=everywhere) == everywhere


@pytest.mark.parametrize(
    "options",
    [
        {"pin_memory": False},
        {"use_streams": False},
        {"in_flight_bytes": 0},
        {"pin_memory": False, "in_flight_bytes": 100},
    ],
    ids=str,
)
def test_how_copies_are_made(options):
    def run(device, region, before_backward):
        net, x = layers(6, 8).to(device), data(3, 8).requires_grad_()
        with region():
            y = net(x)
        before_backward()
        y.square().sum().backward()
        return y, x.grad, grads(net)

    both_ways(run, lambda: everything(**options))


@cached
def test_host_memory_that_is_not_page_locked():
    def pinned(**options):
        torch_offload.empty_cache()
        before, was_held = stats("host.pinned_bytes.current"), held()
        with everything(**options):
            y = data(1 << 20).requires_grad_().exp().sin().cos().exp().sum()
            assert held() - was_held >= 8 << 20
            kept = stats("host.pinned_bytes.current") - before
        y.backward()
        return kept

    rings = 32 << 20  # through which it is copied
    assert pinned(pin_memory=False) <= rings
    if GPU and "TORCH_OFFLOAD_PINNED_LIMIT" not in os.environ:
        assert pinned() >= 8 << 20


def ahead_in_backward(count=16, retain_graph=False, **options):
    """How much is held for what is to be asked for, in saved tensors, before the backward of each of the operations."""
    seen = []
    x = data(64, 64).requires_grad_()
    with everything(**options):
        y = x
        for _ in range(count):
            y = y.sin()
            y.register_hook(lambda _: seen.append(stats("device.pinned_slot_bytes.current") / x.nbytes))
        y = y.sum()
    torch_offload.empty_cache()
    y.backward(retain_graph=retain_graph)
    assert len(seen) == count
    return seen


@cached
def test_bytes_in_flight():
    def on_the_device(**options):
        torch_offload.empty_cache()
        x = data(64, 64).requires_grad_()
        with everything(**options):
            y = x.exp().exp().exp().exp().exp().exp().sin()
            slots = stats("device.slot_bytes.current")
        y.sum().backward()
        return slots / x.nbytes

    assert on_the_device(in_flight_bytes=0) == 0
    assert on_the_device(use_streams=False) == 0
    if not {"TORCH_OFFLOAD_EVICT", "TORCH_OFFLOAD_RING_BYTES"} & {*os.environ}:
        assert on_the_device(in_flight_bytes=2 * 64 * 64 * 4) == 2
        assert on_the_device() == 5
        assert max(ahead_in_backward(in_flight_bytes=2 * 64 * 64 * 4)) == 2
        assert max(ahead_in_backward(in_flight_bytes=0)) == 1


@cached
def test_in_flight_bytes_are_those_of_saved_tensors():
    """Gradients that are on the device stay there, where the next ones are added to them."""
    if "TORCH_OFFLOAD_EVICT" in os.environ or torch_offload.get_ring_bytes() < 1 << 20:
        pytest.skip("nothing stays")
    net, moved = layers(4, 64).to(OFFLOAD), []

    def train(**options):
        for _ in range(5):
            before = stats("link.bytes_to_device")
            with everything(**options):
                loss = net(data(8, 64)).square().sum()
            loss.backward()
            moved.append(stats("link.bytes_to_device") - before)

    train()
    train(in_flight_bytes=0)
    assert moved[-1] <= moved[4] + 12 * (8 * 64 * 4)  # what is saved, and less than half of the gradients


@cached
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="nothing that is ahead stays")
@pytest.mark.skipif("TORCH_OFFLOAD_RING_BYTES" in os.environ, reason="of a small ring, hardly any")
def test_storages_that_grow_in_backward_are_fetched_ahead():
    x, before = data(1 << 14).requires_grad_(), stats("cache.prefetches")
    with everything():
        y = x
        for _ in range(7):
            y = y.sigmoid().view(4, -1).sum(0)
        for _ in range(9):  # after which no more need be given back first
            y = y.exp()
        y = y.sum()
    torch_offload.empty_cache()
    y.backward()
    assert stats("cache.prefetches") - before >= 4


@cached
def test_without_streams_nothing_is_made_ahead():
    assert max(ahead_in_backward(use_streams=False)) == 0


@cached
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="nothing that is ahead stays")
@pytest.mark.skipif("TORCH_OFFLOAD_RING_BYTES" in os.environ, reason="of a small ring, one at a time")
def test_what_is_fetched_ahead_takes_no_more_than_backward_has_given_back():
    seen = ahead_in_backward()
    assert seen[:2] == [0, 0]
    assert all(ahead <= max(0, given) for given, ahead in enumerate(seen, -1)), seen
    assert max(seen) >= 4
    seen = ahead_in_backward(60)
    assert seen[:4] == [0] * 4, "before a sixteenth has been given back"
    assert max(seen) >= 4
    seen = ahead_in_backward(retain_graph=True)  # gives nothing back
    assert seen[:8] == [0] * 8
    assert max(seen) >= 4


def test_as_a_decorator():
    @everything()
    def forward(net, x, depth=1):
        h = net(x)
        return forward(net, h, depth - 1) if depth else h

    net, x = layers(2, 8).to(OFFLOAD), data(3, 8)
    forward(net, x).sum().backward()
    expected = grads(net)
    net.zero_grad()
    net(net(x)).sum().backward()
    assert_same(grads(net), expected)


@cached
def test_a_decorated_generator_saves_in_the_region_while_it_runs():
    big = 32 * 64 * 4

    def gone(run):
        before = sent_home()
        y = run()
        sent = sent_home() - before
        y.sum().backward()
        return sent

    def steps(x):
        for _ in range(4):
            x = x.exp().sin()
            yield x

    def inside(decorated):
        *_, last = decorated(data(32, 64).requires_grad_())
        return last

    def between(decorated):
        """What is computed while it is suspended, on a value that it has nothing of."""
        x = data(32, 64).requires_grad_()
        running = decorated(data(1, 1))
        for _ in running:
            x = x.exp().sin()
        return x

    region = everything()
    assert gone(lambda: inside(region(steps))) >= 3 * big
    assert gone(lambda: between(region(steps))) == 0
    with everything():
        assert gone(lambda: inside(keep_saved_tensors()(steps))) == 0


def test_a_program_without_offload_tensors():
    """Also where nothing else has used the device before."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = data(8, 8).requires_grad_()
        with everything():
            y = x.exp().sin().sum()
        y.backward()
    assert_same(x.grad, x.detach().exp().cos() * x.detach().exp())


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_peak_of_gpu_memory():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(24)]).to(COMPUTE)
    x = data(16384, 512)  # 32 MiB, of which each layer saves two

    def peak(context):
        net.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with context:
            loss = net(x).sum()
        loss.backward()
        return torch.cuda.max_memory_allocated()

    ring = torch_offload.get_ring_bytes()
    try:
        torch_offload.set_ring_bytes(128 << 20)
        peak(contextlib.nullcontext())
        plain, offloaded = peak(contextlib.nullcontext()), peak(saved_tensors())
    finally:
        torch_offload.set_ring_bytes(ring)
    assert plain - offloaded > 0.6 * 48 * x.nbytes
