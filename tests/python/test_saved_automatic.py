"""``saved_tensors(share=...)``: a part of what is saved travels, as much as the link hides if nobody says how much."""

import os
from fractions import Fraction

import numpy
import pytest
import torch
from helpers import CACHED, COMPUTE, GPU, OFFLOAD, assert_same, data, layers, says
from saving import PLACES, both_ways, cached, everything, sent_home
from torch import nn

import torch_offload
from torch_offload import offload_activations, saved_tensors

STEPS = 12


def automatic(**options):
    return saved_tensors(min_bytes=0, share="auto", **options)


def train(net, region, steps=STEPS, count=3):
    """The losses and the bytes that each step sent."""
    losses, sent = [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        before = sent_home()
        with region:
            loss = net(data(count, 8, seed=step)).square().mean()
        sent.append(sent_home() - before)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, sent


def test_training():
    region = automatic()

    def run(device, region, empty):
        torch.manual_seed(0)
        net = layers(4, 8).to(device)
        return train(net, region())[0], [p.detach() for p in net.parameters()]

    both_ways(run, lambda: region)


@cached
@pytest.mark.parametrize("share", [0, 0.25, 0.5, 1])
def test_a_share_is_spread_evenly(share):
    """Between all that is saved and nothing of it, every fourth or second result travels."""
    x, gone = data(32, 64).requires_grad_(), []
    before = sent_home()
    with everything(share=share):
        y = x
        for _ in range(24):
            y = y.sigmoid()  # saves its result
            gone.append((sent_home() - before) / (32 * 64 * 4))
        loss = y.sum()
    assert gone[-1] == pytest.approx(23 * share, abs=1)
    assert gone == pytest.approx([max(0, i - 1) * share for i in range(24)], abs=1.5)
    loss.backward()
    z = x.detach().requires_grad_()
    nn.Sequential(*[nn.Sigmoid() for _ in range(24)])(z).sum().backward()
    assert_same(x.grad, z.grad)


SIZE = 32 * 64 * 4


def sigmoids(region, count=24):
    """Of a chain of them, how many of the results have gone home behind each; and its gradient is the one without a region."""
    x, z = data(32, 64).requires_grad_(), data(32, 64).requires_grad_()
    before, gone = sent_home(), []
    with region:
        y = x
        for _ in range(count):
            y = y.sigmoid()  # saves its result
            gone.append((sent_home() - before) / SIZE)
        loss = y.sum()
    loss.backward()
    nn.Sequential(*[nn.Sigmoid() for _ in range(count)])(z).sum().backward()
    assert_same(x.grad, z.grad)
    return gone


@cached
@pytest.mark.parametrize("keep_bytes", [0, 2 * SIZE])
def test_no_more_stays_than_may(keep_bytes):
    """Of 24 results one is in use and one is looked at later, and those of keep_bytes wait."""
    region = everything(share=0, max_gpu_bytes=11 * SIZE, keep_bytes=keep_bytes)
    may = 22 - keep_bytes // SIZE  # go at all
    stay = 11 - keep_bytes // SIZE
    first = sigmoids(region)
    assert first[24 - may + stay - 1] == 0
    assert first[-1] == may - stay
    for _ in range(3):  # by what the last step has saved
        gone = sigmoids(region)
        assert gone[-1] == pytest.approx(may - stay, abs=1)
        assert gone == pytest.approx([max(0, i - 24 + may) * (may - stay) / may for i in range(24)], abs=1.5)
    assert sigmoids(region, 12)[-1] == pytest.approx((12 - 24 + may) * (may - stay) / may, abs=1)
    assert sigmoids(region, 12)[-1] <= max(0, 12 - 24 + may - stay) + 1
    assert sigmoids(region, 48)[-1] >= 24 + may - stay - 1


@cached
def test_what_stays_may_of_all_graphs_that_live():
    net, graphs = nn.Sequential(*[nn.Sigmoid() for _ in range(8)]), []
    region = everything(share=0, max_gpu_bytes=8 * SIZE)

    def sent_by_one_more():
        before = sent_home()
        with region:
            graphs.append(net(data(32, 64).requires_grad_()).sum())
        return sent_home() - before

    for _ in range(3):
        sent_by_one_more()
    graphs.pop(0)
    assert sent_by_one_more() <= 2 * SIZE  # there is room where the first one was
    assert sent_by_one_more() >= 6 * SIZE


@cached
@pytest.mark.parametrize(("most", "demanded"), [(0, 1), (10 * SIZE, 0.5), (1 << 40, 0)])
def test_what_is_learned_is_not_less_than_what_is_demanded(most, demanded):
    region = automatic(max_gpu_bytes=most)
    for _ in range(6):
        gone = sigmoids(region)
        if GPU:
            torch.cuda.synchronize()
        assert gone[-1] >= demanded * 22 - 1
    assert region.plan.demanded_share == pytest.approx(demanded, abs=0.1)
    assert region.plan.share >= region.plan.demanded_share
    assert f" of what is saved travels{', ' if demanded else '; last'}" in str(region.plan)


@cached
def test_a_little_that_may_stay():
    """Without a share no more goes than must."""
    region = everything(max_gpu_bytes=2 * SIZE)
    for _ in range(4):
        assert sigmoids(region)[-1] == pytest.approx(20, abs=1)
    assert sigmoids(everything(max_gpu_bytes=30 * SIZE))[-1] == 0
    assert sigmoids(everything(max_gpu_bytes=0))[-1] == 22
    assert sigmoids(everything(max_gpu_bytes=30 * SIZE, share=1))[-1] == 22


@cached
def test_rows_that_free_what_they_are_of():
    """A row goes home by itself, and with it goes the storage that it is of, which is what would stay."""
    region, x = everything(max_gpu_bytes=12 * 64 * 64 * 4), data(64, 64).requires_grad_()

    def run():
        x.grad, before, gone, total = None, sent_home(), [], 0
        for factor in range(24):
            total = total + (x * factor)[factor].square().sum()
            gone.append((sent_home() - before) // (64 * 4))
        return total, gone

    run()[0].backward()
    plain = x.grad
    for step in range(3):
        with region:
            total, gone = run()
        total.backward()
        assert gone[-1] == pytest.approx(11, abs=1)
        assert gone[12] == pytest.approx(6 if step else 0, abs=1.5)
        assert_same(x.grad, plain)


@cached
def test_what_the_head_saves_last_stays():
    ring = torch_offload.get_ring_bytes()
    torch_offload.set_ring_bytes(1 << 16)
    try:
        x, before = data(64, 1024).requires_grad_(), sent_home()
        with saved_tensors(min_bytes=1 << 10):
            loss = nn.functional.cross_entropy(x.sigmoid() * 2, torch.zeros(64, dtype=torch.long, device=x.device))
        assert sent_home() - before == x.nbytes  # what the sigmoid gave, and not the logarithms
        loss.backward()
    finally:
        torch_offload.set_ring_bytes(ring)
    z = x.detach().requires_grad_()
    nn.functional.cross_entropy(z.sigmoid() * 2, torch.zeros(64, dtype=torch.long, device=z.device)).backward()
    assert_same(x.grad, z.grad)


def test_more_is_kept_than_may_stay():
    sentence = "offload: keep_bytes is 5, and max_gpu_bytes, which they are among, is 4; keep no more."
    says(ValueError, sentence, lambda: saved_tensors(keep_bytes=5, max_gpu_bytes=4))
    says(ValueError, "offload: max_gpu_bytes is -1; give bytes, 0 or more.", lambda: saved_tensors(max_gpu_bytes=-1))


@cached
def test_who_looks_at_what_is_saved_begins_no_backward():
    x, before = data(32, 64).requires_grad_(), sent_home()
    with everything(share=0.5):
        y = x
        for _ in range(24):
            y = y.sigmoid()
            assert y.grad_fn._saved_result.shape == y.shape
        y = y.sum()
    assert sent_home() - before >= 10 * 32 * 64 * 4


@cached
def test_short_steps_send_their_share_together():
    before = sent_home()
    with everything(share=0.25):
        for _ in range(16):
            x = data(32, 64).requires_grad_()
            x.sigmoid().sigmoid().sigmoid().sum().exp().backward()
    assert sent_home() - before >= 6 * 32 * 64 * 4


@cached
def test_the_first_two_steps_send_everything_and_are_learned_from():
    torch.manual_seed(0)
    net = layers(4, 8).to(COMPUTE)
    _, everywhere = train(net, everything(), steps=2)
    region = automatic()
    assert region.plan is None
    _, sent = train(net, region)
    assert sent[0] == sent[1] == everywhere[1] > 0
    if GPU:
        torch.cuda.synchronize()
    train(net, region, steps=1)
    plan = region.plan
    assert 0 <= plan.share <= 1
    assert plan.bytes >= sent[0]
    assert plan.sent_bytes <= plan.bytes
    assert 0 <= plan.forward_waited_seconds < plan.forward_seconds
    assert 0 <= plan.backward_waited_seconds < plan.backward_seconds
    assert str(plan).startswith(f"{plan.share:.0%} of what is saved travels; last, {plan.sent_bytes / 1e9:.3f} of ")


def test_a_forward_whose_backward_never_comes():
    region, net = automatic(), layers(2, 8).to(COMPUTE)
    for _ in range(3):
        with region:
            loss = net(data(3, 8)).sum()
        del loss
    losses, _ = train(net, region, steps=4)
    assert all(loss.isfinite() for loss in losses)


@pytest.mark.parametrize("device", PLACES, ids=str)
def test_graphs_that_run_again(device):
    net, x = layers(2, 8).to(device), data(3, 8).requires_grad_()
    region = automatic()
    for _ in range(4):
        x.grad = None
        with region:
            y = net(x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
        twice, x.grad = x.grad, None
        net(x).square().sum().backward()
        assert_same(twice, 2 * x.grad)


@cached
@pytest.mark.skipif(torch.offload.device_count() < 2, reason="needs two devices")
def test_a_model_on_two_devices():
    region, net = automatic(), nn.Sequential(*[nn.Sigmoid() for _ in range(6)])
    for step in range(4):
        x = data(32, 64, seed=step).requires_grad_()
        with region:
            y = net(x)
            with torch.offload.device(1):  # whose cache is meant where all activations are on the CPU
                y = net(y.to("cuda:1") if GPU else y).sum()
        y.backward()
        torch_offload.synchronize()
    assert region.plan.bytes > 0
    z = x.detach().requires_grad_()
    net(net(z)).sum().backward()
    assert_same(x.grad, z.grad)


@cached
@pytest.mark.skipif(torch.offload.device_count() < 2, reason="needs two devices")
def test_what_stays_is_counted_over_both_devices():
    """Of twelve results on each, one is in use and one is looked at later; eight of the others may stay."""
    region, net = everything(share=0, max_gpu_bytes=8 * SIZE), nn.Sequential(*[nn.Sigmoid() for _ in range(12)])

    def sent():
        torch_offload.synchronize()
        return [torch_offload.memory_stats(index)["link.bytes_to_host"] // SIZE for index in (0, 1)]

    for _ in range(4):
        x, before = data(32, 64).requires_grad_(), sent()
        with region:
            y = net(x)
            with torch.offload.device(1):
                y = net(y.to("cuda:1") if GPU else y)
            loss = y.sum()
        gone = [after - was for was, after in zip(before, sent(), strict=True)]
        loss.backward()
    assert sum(gone) == pytest.approx(20 - 8, abs=1)
    assert min(gone) >= 4  # spread over both
    z = x.detach().requires_grad_()
    net(net(z)).sum().backward()
    assert_same(x.grad, z.grad)


def test_modules_enter_a_region_that_is_given():
    region = automatic()
    net = offload_activations(nn.Sequential(*[layers(1, 8) for _ in range(3)]).to(OFFLOAD), include="*", region=region)
    for _ in range(4):
        net(data(3, 8)).sum().backward()
    if GPU:
        torch.cuda.synchronize()
        net(data(3, 8)).sum().backward()
    assert (region.plan is not None) == CACHED
    sentence = "offload: a region is given, and min_bytes for a new one; give one of them."
    says(ValueError, sentence, lambda: offload_activations(net, region=region, min_bytes=3))


@pytest.mark.parametrize(
    ("share", "error"),
    [
        *((value, ValueError) for value in ("some", -0.1, 1.5, 2, float("nan"))),
        *((value, TypeError) for value in ([], 1j, True, False, b"auto", numpy.ones(2))),
    ],
)
def test_a_share_that_is_none(share, error):
    sentence = f'offload: share is {share!r}; give a number from 0 to 1, or "auto".'
    says(error, sentence, lambda: saved_tensors(share=share))
    assert everything().plan is None


@cached
@pytest.mark.parametrize("share", [1, numpy.float32(1), numpy.int64(1), Fraction(1)])
def test_a_share_of_any_kind_of_number(share):
    def sent(**options):
        x, before = data(32, 64).requires_grad_(), sent_home()
        with everything(**options):
            y = x.exp().sin().exp().sum()
        gone = sent_home() - before
        y.backward()
        return gone

    assert sent(share=share) == sent() > 0
    assert sent(share=type(share)(0)) == 0


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.skipif("TORCH_OFFLOAD_COPY_DELAY_US" in os.environ, reason="delayed copies take their own time")
def test_a_program_that_saves_more_than_the_link_can_hide():
    x = data(4096, 4096).requires_grad_()
    region, net = automatic(), nn.Sequential(*[nn.Sigmoid() for _ in range(16)])
    for _ in range(6):
        x.grad = None
        with region:
            y = net(x).sum()
        y.backward()
        torch.cuda.synchronize()
    made, x.grad = x.grad, None
    net(x).sum().backward()
    assert_same(made, x.grad)
    # A sigmoid takes its bytes twice over GPU memory, at tens of times the link's rate.
    assert region.plan.share < 0.3


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.skipif("TORCH_OFFLOAD_COPY_DELAY_US" in os.environ, reason="delayed copies take their own time")
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="the forward pass waits for each copy home")
def test_a_program_whose_copies_the_link_hides():
    x, weight = data(8192, 8192).requires_grad_(), data(8192, 8192, seed=8) / 8192
    region = automatic()
    for _ in range(6):
        x.grad = None
        with region:
            y = x
            for _ in range(6):
                y = ((y @ weight) @ weight).tanh()  # more than 4 TFLOP for each 256 MiB
            y = y.sum()
        y.backward()
        torch.cuda.synchronize()
    assert region.plan.share > 0.9
