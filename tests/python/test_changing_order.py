"""Orders of layers that change from step to step, and steps that write weights which the next forward is fetching already."""

import copy
import random

import pytest
import torch
from helpers import CACHED, COMPUTE, OFFLOAD, assert_same, data, deterministic, grads, layers
from torch import nn

import torch_offload

WIDTH = 32
WEIGHT = WIDTH * WIDTH * 4
BUDGETS = [0, 3 * WEIGHT, "auto"] if CACHED else ["auto"]
STEPS = 10


@pytest.fixture(autouse=True)
def _small_ring():
    ring = torch_offload.get_ring_bytes()
    if CACHED:
        torch_offload.set_ring_bytes(3 * WEIGHT)
    yield
    if CACHED:
        torch_offload.set_ring_bytes(ring)
    torch_offload.set_budget("auto")


class Mixture(nn.Module):
    """Experts of which the data chooses two for each batch."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        weights, chosen = self.gate(x).mean(0).softmax(0).topk(2)
        return sum(w * self.experts[k](x).relu() for w, k in zip(weights, chosen.tolist(), strict=True))


class Ordered(nn.Module):
    """Layers in an order that `choose(step)` gives."""

    def __init__(self, count: int, choose) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.choose = choose

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for k in self.choose(step):
            x = self.layers[k](x).tanh()
        return x


def shuffled(step: int) -> list[int]:
    order = list(range(7))
    random.Random(step).shuffle(order)
    return order


ORDERS = {
    "seven layers in a ring of three": lambda: Ordered(7, lambda step: range(7)),
    "skipped": lambda: Ordered(7, lambda step: [k for k in range(7) if (k + step) % 3]),
    "repeated": lambda: Ordered(5, lambda step: [0, 1, 1, 2, 3, 2, 4, 0][: 5 + step % 4]),
    "shuffled": lambda: Ordered(7, shuffled),
    "one more each step": lambda: Ordered(9, lambda step: range(1 + step % 9)),
    "there and back": lambda: Ordered(6, lambda step: range(6) if step % 2 else range(5, -1, -1)),
    "a mixture of experts": lambda: Mixture(6),
}

# The copies of each order's STEPS, for each budget, where nothing is expected: TORCH_OFFLOAD_PREFETCH=0 on the simulated link.
PLAIN_COPIES = {
    "seven layers in a ring of three": (260, 180, 140),
    "skipped": (164, 116, 92),
    "repeated": (206, 129, 95),
    "shuffled": (260, 181, 140),
    "one more each step": (164, 113, 92),
    "there and back": (220, 155, 120),
    "a mixture of experts": (100, 60, 60),
}


def train(net: nn.Module, steps: int, device: torch.device) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(data(8, WIDTH, device=COMPUTE, seed=step), step).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_that_changes(name, budget):
    torch.manual_seed(0)
    net = ORDERS[name]().to(OFFLOAD)
    plain = copy.deepcopy(net).to(COMPUTE)
    if CACHED:
        torch_offload.set_budget(budget)
        torch_offload.empty_cache()
    torch_offload.synchronize()  # what the host still does is followed by copies, and these are counted one by one
    before = torch_offload.memory_stats()
    with deterministic():
        actual = train(net, STEPS, OFFLOAD)
        torch_offload.synchronize()
        after = torch_offload.memory_stats()
        assert_same(actual, train(plain, STEPS, COMPUTE))
    assert_same(grads(net), grads(plain))
    assert_same(list(net.parameters()), list(plain.parameters()))
    if CACHED:
        copies, fetches, hits, ahead, wasted = (
            after[name] - before[name]
            for name in (
                "link.copies_to_device",
                "cache.fetches",
                "cache.hits",
                "cache.prefetches",
                "cache.prefetches_wasted",
            )
        )
        assert copies == fetches - hits + ahead
        # What is expected in vain costs one copy, and is soon no longer expected.
        assert copies <= PLAIN_COPIES[name][BUDGETS.index(budget)] + fetches / 8
        assert wasted <= fetches / 8
    assert after["device.pinned_slot_bytes.current"] == 0


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_step_while_the_next_forward_is_under_way(way, budget):
    """Nobody waits between a backward, a step that writes host weights, and a forward that fetches them."""
    if CACHED:
        torch_offload.set_budget(budget)
    torch.manual_seed(0)
    net = layers(5, WIDTH).to(OFFLOAD)
    plain = copy.deepcopy(net).to("cpu")
    optimizer, truth = (torch.optim.AdamW(each.parameters(), lr=0.0625, **way) for each in (net, plain))
    x = data(8, WIDTH)
    with deterministic():
        for step in range(50):
            optimizer.zero_grad()
            y = net(x)
            y.square().mean().backward()
            seen = [p.grad for p in net.parameters()]
            # The truth of a step on the host is the CPU's, on the same gradients and weights.
            old = copy.deepcopy(net).to(COMPUTE)
            optimizer.step()
            ahead = net(x)  # fetched behind the step
            for mine, theirs in zip(seen, plain.parameters(), strict=True):
                theirs.grad = mine.cpu()
            truth.step()
            assert_same(list(net.parameters()), list(plain.parameters()), f"weights after step {step}")
            new = copy.deepcopy(net).to(COMPUTE)
            assert_same(ahead, new(x), "the forward behind the step saw the new weights")
            old(x).square().mean().backward()
            assert_same(seen, [p.grad for p in old.parameters()], "the backward before it saw the old ones")
