"""``torch_offload.saved_tensors``: what autograd saves goes to host memory and comes back, with the same bits."""

import contextlib
import os
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, OFFLOAD, assert_same, at, data, grads, layers
from saving import PLACES, both_ways, cached, everything, held, sent_home, stats
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_offload
from torch_offload import saved_tensors

MODELS = {
    "linear": (lambda: layers(4, 8), (3, 8)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2)
        ),
        (2, 3, 8, 8),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), (2, 5, 8)),
    "attention": (lambda: Attention(), (2, 5, 8)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Softmax(-1), nn.RMSNorm(8)), (3, 8)),
    "mixed": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.SiLU(), nn.Linear(8, 8), nn.GLU()), (3, 8)),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.parts(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("empty", [False, True], ids=["found in the cache", "copied back"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name, empty):
    make, shape = MODELS[name]

    def run(device, region, before_backward):
        net = make().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        seen = []
        for step in range(3):
            x = data(*shape, seed=step).requires_grad_()
            with region():
                y = net(x)
                loss = y.square().mean()
            before_backward()
            optimizer.zero_grad()
            loss.backward()
            seen.append((y.detach().clone(), x.grad, {k: v.clone() for k, v in grads(net).items()}))
            optimizer.step()
        return seen

    both_ways(run, empty=empty)


def test_channels_last():
    def run(device, region, before_backward):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3)).to(
            device, memory_format=torch.channels_last
        )
        x = data(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
        with region():
            y = net(x)
        before_backward()
        y.sum().backward()
        return x.grad, x.grad.stride(), grads(net)

    both_ways(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    def run(device, region, before_backward):
        net, x = layers(3, 8).to(device), data(3, 8).requires_grad_()
        with region(), torch.autocast(COMPUTE.type, dtype):
            y = net(x)
        before_backward()
        y.float().square().sum().backward()
        return y, x.grad, grads(net)

    both_ways(run)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.t() @ x)[1:].transpose(0, 1).square(),
        lambda x: x[:, 1:5].sigmoid() * x[:, 3:7].exp() * x[:, 1:5],
        lambda x: torch.cat([x.tanh(), x.tanh().t().reshape(6, 8)]).cos(),
        lambda x: x.unfold(1, 4, 2).sin().square(),
        lambda x: x.sum().exp() * x.exp(),
        lambda x: torch.view_as_complex(x.exp().reshape(6, 4, 2)).conj().mul(2j).square().abs(),
        lambda x: torch.where(x > 0, x.exp(), x.square()),
        lambda x: x.exp().expand(3, 6, 8).square(),
        lambda x: x[:0].exp().sum() + x.exp(),
        lambda x: x.double().exp().to(x.dtype).square(),
    ],
)
def test_kinds_of_tensors(function):
    def run(device, region, before_backward):
        x = data(6, 8).requires_grad_()
        with region():
            y = function(x)
        before_backward()
        y.sum().backward()
        return y, x.grad

    both_ways(run)


@cached
def test_a_storage_travels_once_however_often_it_is_saved():
    x = data(64, 64).requires_grad_()
    before = sent_home()
    with everything():
        h = x.exp()
        y = [h.sin(), h.t().cos(), h[3:].square(), h[:, ::2].tanh()]
        del h
        total = sum(part.sum() for part in y)
        del y
        x.sum().exp()
    # exp saves what sin, cos and square do; tanh saves its result.
    assert sent_home() - before == 64 * 64 * 4 + 64 * 32 * 4
    torch_offload.empty_cache()
    fetched = stats("link.bytes_to_device")
    total.backward()
    if "TORCH_OFFLOAD_EVICT" not in os.environ:  # which leaves nothing for the next one who asks
        assert stats("link.bytes_to_device") - fetched == 64 * 64 * 4 + 64 * 32 * 4
    h = x.detach().exp()
    expected = h.cos() - h.sin() + (1 - (h.tanh()).square()).mul(torch.arange(64, device=COMPUTE) % 2 == 0)
    expected[3:] += 2 * h[3:]
    torch.testing.assert_close(x.grad, expected * h)


@cached
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="nothing that is ahead stays")
def test_what_one_node_saved_comes_back_once_in_whatever_order_it_asks():
    ring, x = torch_offload.get_ring_bytes(), data(64, 64).requires_grad_()
    torch_offload.set_ring_bytes(2 * 64 * 64 * 4)
    try:
        before = sent_home()
        with everything():
            y = x
            for _ in range(6):
                y = (y + 1) * (y * 0.5)  # a product asks for its first factor first
            y = y.sum()
        sent = sent_home() - before
        torch_offload.empty_cache()
        fetched = stats("link.bytes_to_device")
        y.backward()
        assert sent >= 10 * 64 * 64 * 4
        assert stats("link.bytes_to_device") - fetched == sent
    finally:
        torch_offload.set_ring_bytes(ring)


@cached
def test_what_somebody_holds_stays():
    net, x = nn.Linear(64, 64).to(COMPUTE), data(32, 64).requires_grad_()
    before = sent_home()
    with everything():
        y = net(x)
        z = y.exp()
        loss = z.sum() + 0
    assert sent_home() == before  # the weight is a parameter's, x and z are ours
    loss.backward()
    assert_same(x.grad, z.detach() @ net.weight.detach())


@cached
def test_what_is_let_go_later_goes_when_more_is_saved():
    x = data(32, 64).requires_grad_()
    before = sent_home()
    with everything():
        y = x.exp()
        total = y.sum()
        y.sin()
        assert sent_home() == before
        del y
        total = total + x.square().sum()
    assert sent_home() - before == 32 * 64 * 4
    total.backward()
    assert_same(x.grad, x.detach().exp() + 2 * x.detach())


@pytest.mark.parametrize("device", PLACES, ids=str)
def test_written_to_after_it_was_saved(device):
    weight, x = at(device, 4, 4).requires_grad_(), data(4, 4).requires_grad_()
    with everything():
        h = x @ weight
        y = h.exp()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()
    with everything():
        y = x.exp()
        z = y.sin()
        y.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        z.sum().backward()


def test_retained_and_recorded_graphs():
    def run(device, region, before_backward):
        net, x = layers(3, 8).to(device), data(3, 8).requires_grad_()
        with region():
            y = net(x).square().sum()
        before_backward()
        y.backward(retain_graph=True)
        before_backward()
        y.backward(retain_graph=True)
        before_backward()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        first.norm().backward()
        with region():
            (second,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
            penalty = second.norm()
        before_backward()
        penalty.backward()
        return x.grad, first, second, grads(net)

    both_ways(run)


@cached
def test_abandoned_graphs_give_their_memory_back():
    net, x = layers(4, 64).to(OFFLOAD), data(32, 64).requires_grad_()
    before = held()
    for _ in range(3):
        with everything():
            y = net(x).sum()
        assert held() > before
        del y
        assert held() == before
    with pytest.raises(ZeroDivisionError), everything():
        net(x).sum().backward(torch.tensor(1 / 0))
    assert held() == before
    with everything():
        y = net(x).sum()
    y.backward()
    del y
    assert held() == before


@cached
def test_a_tensor_that_is_kept_is_not_kept_for_ever():
    x = data(8, 8).requires_grad_()
    with saved_tensors(min_bytes=1 << 30):
        y = x.exp()
        z = y.sin()
    storage = weakref.ref(y.untyped_storage())
    gone = weakref.ref(y)
    del y, z
    assert gone() is None
    assert storage() is None


@pytest.mark.parametrize("size", [0, 512])
def test_a_storage_that_is_resized_after_it_was_saved(size):
    def run(region):
        x = data(64, 64).requires_grad_()
        with region:
            h = x.exp()
            row = h[:1]
            y, edge = row.sin(), torch.autograd.graph.get_gradient_edge(row)
            with torch.no_grad():
                torch.ops.inductor.resize_storage_bytes_(h.detach(), size)
            del h, row
            z = y.cos().sum().exp()
        return torch.autograd.grad(z, edge) if size > 0 else None  # the row is within what is left

    assert_same(run(everything()), run(contextlib.nullcontext()))


def test_two_models_at_once():
    def run(device, region, before_backward):
        nets = [layers(3, 8).to(device) for _ in range(2)]
        context = region()
        losses = []
        for step in range(2):
            h = [data(3, 8, seed=step), data(3, 8, seed=step + 5)]
            for k in range(len(nets[0])):
                for m, net in enumerate(nets):
                    with context:
                        h[m] = net[k](h[m])
            losses += [part.square().sum() for part in h]
        before_backward()
        for loss in (losses[1], losses[2], losses[0], losses[3]):
            loss.backward()
        return [grads(net) for net in nets]

    both_ways(run)


def test_threads():
    net = layers(4, 16)
    expected = [torch.func.grad(lambda x: net(x).square().sum())(at("cpu", 3, 16, seed=k)) for k in range(4)]
    net.to(OFFLOAD)
    region, results = everything(), [None] * 4

    def work(k):
        for _ in range(5):
            x = data(3, 16, seed=k).requires_grad_()
            with region:
                loss = net(x).square().sum()
            torch_offload.empty_cache()
            (results[k],) = torch.autograd.grad(loss, x)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        torch.testing.assert_close(results[k].cpu(), expected[k])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    def run(device, region, before_backward):
        net, x = nn.ModuleList(layers(2, 8) for _ in range(4)).to(device), data(3, 8).requires_grad_()
        h = x.exp()
        with region():
            for block in net:
                h = checkpoint(block, h, use_reentrant=reentrant)
        before_backward()
        h.sum().backward()
        return x.grad, grads(net)

    both_ways(run)


@cached
@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_of_checkpointed_regions_go_and_what_is_recomputed_does_not(reentrant):
    net, h = nn.ModuleList(layers(2, 64) for _ in range(4)).to(COMPUTE), data(32, 64).requires_grad_().exp()
    before = sent_home()
    region = everything()
    with region:
        for block in net:
            h = checkpoint(block, h, use_reentrant=reentrant)
        h = h.sum().exp()
    gone = sent_home() - before
    assert 3 * 32 * 64 * 4 <= gone <= 4 * 32 * 64 * 4 + 1000
    with region:
        h.backward()
    assert sent_home() - before == gone
