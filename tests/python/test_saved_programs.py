"""``torch_offload.saved_tensors`` around policies of checkpoints, threads, streams, all kinds of tensors."""

import contextlib
import os
import threading
import time

import pytest
import torch
from helpers import COMPUTE, GPU, OFFLOAD, assert_same, data, grads, layers
from saving import PLACES, both_ways, cached, everything, held, sent_home, stats
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_offload
from torch_offload import offload_activations


@pytest.mark.parametrize("empty", [False, True], ids=["found in the cache", "copied back"])
def test_selective_checkpointing(empty):
    """What the policy keeps is kept by it and computed once; the rest is computed again, with the region as without."""
    counts = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            counts.append(1)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def block(h, weight):
        return Counted.apply(torch.mm(h, weight).tanh()).exp()

    def run(device, region, before_backward):
        counts.clear()
        weights = [data(8, 8, seed=k).requires_grad_() for k in range(3)]
        x = data(4, 8).requires_grad_()
        h = x.exp()
        with region():
            for weight in weights:
                h = checkpoint(
                    block,
                    h,
                    weight,
                    use_reentrant=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(policy),
                )
        before_backward()
        h.sum().backward()
        return x.grad, [w.grad for w in weights], len(counts)

    both_ways(run, empty=empty)


class SavesAtItsEnd(torch.autograd.Function):
    """As a compiled function does."""

    @staticmethod
    def forward(ctx, x, *others):
        results = [x]
        for _ in range(20):
            results.append(results[-1].sigmoid())
        ctx.save_for_backward(*others, *results)
        ctx.others = len(others)
        return results[-1].sum()

    @staticmethod
    def backward(ctx, g):
        saved = ctx.saved_tensors
        return g * saved[-1], *(g * other for other in saved[: ctx.others])


@cached
@pytest.mark.skipif("TORCH_OFFLOAD_RING_BYTES" in os.environ, reason="sets it")
def test_what_is_saved_at_the_end_is_sent_when_the_region_is_left():
    """However much of what was saved before waits, and is held; and what is said there is a warning of Python's."""
    x, others = data(32, 32).requires_grad_(), [data(8, seed=k).requires_grad_() for k in range(300)]
    ring, region, losses = torch_offload.get_ring_bytes(), everything(max_host_bytes=60 * x.nbytes), []
    torch_offload.set_ring_bytes(4 * x.nbytes)
    try:
        for _ in range(3):
            before = sent_home()
            with region:
                losses.append(SavesAtItsEnd.apply(x, *others))
            assert sent_home() - before >= 16 * x.nbytes
        with pytest.warns(UserWarning, match="saved tensors stay on the device"), region:
            losses.append(SavesAtItsEnd.apply(x, *others))
        sum(losses).backward()
    finally:
        torch_offload.set_ring_bytes(ring)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        raise ZeroDivisionError


@pytest.mark.parametrize("retain_graph", [False, True])
def test_an_exception_in_backward(retain_graph):
    """What had come back goes with the graph, and another graph of the same region is right."""
    x, was_held, region = data(32, 32).requires_grad_(), held(), everything()
    with region:
        y = x
        for k in range(12):
            y = Fails.apply(y) if k == 5 else y.sin()
        loss = y.sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=retain_graph)
    del loss, y
    # The engine's thread of a GPU lets go of the graph after it has told the exception.
    end = time.monotonic() + 60
    while held() != was_held and time.monotonic() < end:
        time.sleep(0.001)
    assert held() == was_held
    assert stats("device.pinned_slot_bytes.current") == 0
    with region:
        y = x.exp().sin().cos().sum()
    y.backward()
    z = x.detach().requires_grad_()
    z.exp().sin().cos().sum().backward()
    assert_same(x.grad, z.grad)
    del y
    assert held() == was_held


def test_replicas_in_threads():
    """As DataParallel runs them: one region around all, which their threads enter, and one backward."""
    weights = [data(16, 16, seed=k).requires_grad_() for k in range(3)]

    def replica(x, results, k):
        with region():
            h = x
            for weight in weights:
                h = (h @ weight).sin().exp()
            results[k] = h

    def step():
        for weight in weights:
            weight.grad = None
        xs = [data(8, 16, seed=10 + k).requires_grad_() for k in range(4)]
        results = {}
        threads = [threading.Thread(target=replica, args=(x, results, k)) for k, x in enumerate(xs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.stack([results[k] for k in range(4)]).square().sum().backward()
        return [x.grad for x in xs], [w.grad for w in weights]

    region = contextlib.nullcontext
    expected = step()
    one = everything()
    region = lambda: one  # noqa: E731
    for _ in range(3):
        actual = step()
        assert_same(actual[0], expected[0])
        torch.testing.assert_close(actual[1], expected[1])  # summed in the order in which the replicas were built


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("turn", [False, True], ids=["backward here", "backward on a third stream"])
def test_side_streams(turn):
    net, x = layers(8, 256).to(COMPUTE), data(256, 256).requires_grad_()
    net(x).square().sum().backward()
    expected, x.grad = [grads(net), x.grad], None
    net.zero_grad()
    forward, backward = torch.cuda.Stream(), torch.cuda.Stream() if turn else torch.cuda.current_stream()
    for _ in range(5):
        forward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(forward), everything():
            loss = net(x).square().sum()
        backward.wait_stream(forward)
        torch_offload.empty_cache()
        with torch.cuda.stream(backward):
            loss.backward()
        torch.cuda.current_stream().wait_stream(backward)
        torch.testing.assert_close([grads(net), x.grad], expected)
        x.grad = None
        net.zero_grad()


KINDS = {
    "a mask": lambda x: torch.where((x > 0).clone(), x.exp(), x.sin()),
    "complex": lambda x: torch.fft.fft(x).abs(),
    "conjugate": lambda x: (torch.view_as_complex(x.view(-1, 2)).exp().conj() * 2j).square().real,
    "half": lambda x: x.half().exp().float().sin(),
    "long": lambda x: x.exp().gather(1, (x.argsort(1) * 1)).sin(),
    "0-dim": lambda x: x.exp().sum().exp().log() * x.exp().sin(),
    "sparse": lambda x: torch.sparse.mm((torch.eye(8, device=x.device) * 1).to_sparse(), x.exp()).sin(),
    "nested": lambda x: torch.nested.as_nested_tensor([x[:2].exp(), x[2:].exp()], layout=torch.jagged).sin().values(),
    "a subclass": lambda x: TwoTensor(x.exp(), x.exp()).sin().a,
    "float8": lambda x: x.exp().to(torch.float8_e4m3fn).to(x.dtype) * x.sin(),
    "a quantised one": lambda x: torch.fake_quantize_per_tensor_affine(x.exp(), 0.1, 0, -128, 127).sin(),
    "on the CPU": lambda x: (x.cpu().exp().sin().to(x.device) + x.exp()).sin(),
    "on offload": lambda x: x.exp() * (x.detach().to("offload") * 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensors(kind):
    def run(device, region, before_backward):
        x = data(8, 8).requires_grad_()
        with region():
            y = KINDS[kind](x)
            z = x.exp().sin().exp()
        before_backward()
        (y.sum() + z.sum()).backward()
        return x.grad

    both_ways(run)


def test_offload_activations_of_an_offload_model_on_a_stream_of_steps():
    """Weights and activations share the ring, in changing shapes."""
    if "TORCH_OFFLOAD_EVICT" in os.environ:
        pytest.skip("takes long where nothing is found again")
    net = nn.Sequential(*[layers(2, 16) for _ in range(4)])
    plain = nn.Sequential(*[layers(2, 16) for _ in range(4)])
    plain.load_state_dict(net.state_dict())
    net, plain = offload_activations(net.to(OFFLOAD), min_bytes=0), plain.to(COMPUTE)
    for step in range(20):
        x = data(1 + step % 5, 16, seed=step)
        for each in (net, plain):
            each.zero_grad()
            each(x).square().sum().backward()
        assert_same(grads(net), grads(plain), f"step {step}")


@cached
def test_what_is_fetched_of_offload_weights_does_not_travel():
    """It is on the host already; the activations go, as beside weights on the compute device."""
    sent = []
    for device in PLACES:
        net, x = layers(4, 64).to(device), data(32, 64).requires_grad_()
        before = sent_home()
        with everything():
            loss = net(x).square().sum()
        sent.append(sent_home() - before)
        loss.backward()
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize("region_is_outside", [True, False])
def test_hooks_of_the_user_around_a_region_and_within(region_is_outside):
    def run(device, region, empty):
        packed, unpacked = [], []

        def pack(tensor):
            packed.append(tensor.shape)
            return tensor * 2

        def unpack(tensor):
            unpacked.append(tensor.shape)
            return tensor / 2

        around, within = region, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        if not region_is_outside:
            around, within = within, around
        net, x = layers(2, 8).to(device), data(3, 8).requires_grad_()
        with around():
            y = net(x).sigmoid()
            with within():
                y = (y * y).exp()
            y = y.tanh().square().sum()
        empty()
        y.backward()
        assert sorted(unpacked) == sorted(packed) != []
        return [x.grad, *(parameter.grad for parameter in net.parameters())]

    both_ways(run)
