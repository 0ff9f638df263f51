"""What the tests of quantised weights share: what a model consists of, adapters over it, and what must hold of any of them."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from helpers import CACHED, COMPUTE, CPU, OFFLOAD, assert_same, at, deterministic
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import torch_offload

WIDTH = 64
GROUP = 16
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
needs_cache = pytest.mark.skipif(not CACHED, reason="there is no cache")


@pytest.fixture(autouse=True)
def settings():
    """Nothing is cached before a test, and what it sets ends with it."""
    ring = torch_offload.get_ring_bytes()
    # torchao turns TensorFloat-32 on, and sets much of inductor.
    precision, inductor = torch.get_float32_matmul_precision(), inductor_config.shallow_copy_dict()
    torch_offload.empty_cache()
    yield
    torch.set_float32_matmul_precision(precision)
    inductor_config.load_config(inductor)
    torch_offload.set_ring_bytes(ring)
    torch_offload.set_budget("auto")


class Adapted(nn.Module):
    """A frozen layer with a small trained product beside it."""

    def __init__(self, layer, seed, dtype):
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(at(CPU, 4, WIDTH, seed=seed).to(dtype) / 8)
        self.b = nn.Parameter(at(CPU, WIDTH, 4, seed=seed + 1).to(dtype) / 8)

    def forward(self, x):
        return self.layer(x) + x @ self.a.t() @ self.b.t()


def adapted(net, dtype=torch.float32):
    """A model with an adapter over each of its layers."""
    return nn.Sequential(*[Adapted(layer, 100 + 2 * k, dtype) for k, layer in enumerate(net)])


def parts(tensor):
    """The plain tensors that a tensor consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, name))]


def opened(module):
    """The plain tensors that a module consists of."""
    return [part for _, value in sorted(module.state_dict().items()) for part in parts(value)]


def bytes_of(module):
    """Of all that it consists of."""
    return sum(part.nbytes for part in opened(module))


def devices(module):
    """Where its tensors and their parts are."""
    return devices_in(module.state_dict())


def devices_in(state):
    return {part.device.type for value in state.values() for part in (value, *parts(value))}


def train(net, x, steps=2):
    """Each step's loss and gradients."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        seen.append((loss.detach(), {name: p.grad.cpu() for name, p in net.named_parameters() if p.grad is not None}))
        optimizer.step()
    return seen


def check_training(net, x, dtype):
    """Adapters over a frozen base: losses, gradients and trained values are those of the resident model."""
    plain, net = adapted(net, dtype).to(COMPUTE), adapted(copy.deepcopy(net), dtype).to(OFFLOAD)
    with deterministic():
        # The first step alone: the optimizer's own step is the CPU's, whose bits differ from CUDA's.
        steps = 1 if COMPUTE.type == "cuda" else 2
        expected, actual = train(plain, x, steps), train(net, x, steps)
    assert len(actual[0][1]) == 2 * len(net)
    assert_same(actual, expected)
    frozen_now = [part.cpu() for part in opened(nn.ModuleList(block.layer for block in net))]
    frozen_then = [part.cpu() for part in opened(nn.ModuleList(block.layer for block in plain))]
    assert_same(frozen_now, frozen_then)


def moved_in_a_step(net, x, steps=16):
    """Bytes to the device of one forward pass among many, with nothing kept between two of them.

    Among so many that what the last of them has fetched ahead, a ring full, is little.
    """
    with torch.no_grad():
        for _ in range(4):
            net(x)
        before = torch_offload.memory_stats()["link.bytes_to_device"]
        for _ in range(steps):
            net(x)
        return (torch_offload.memory_stats()["link.bytes_to_device"] - before) / steps


def check_bytes(make, x):
    """What crosses the link in a step is no more than what is packed; ``make(count)`` gives a model."""
    net = make(48).to(OFFLOAD)
    packed = bytes_of(net)
    unpacked = 4 * WIDTH * WIDTH
    assert packed > 7 * unpacked
    torch_offload.set_ring_bytes(4 * unpacked)
    torch_offload.set_budget(0)
    moved = moved_in_a_step(net, x)
    assert packed / 2 <= moved <= 1.05 * packed, f"{moved} bytes for {packed} that are packed"


class Recomputed(nn.Module):
    """A model whose backward computes each block again."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        for block in self.net:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def moved_in_training(net, x, steps, optimizer=None):
    """Bytes to the device and bytes home of so many steps; without an optimizer these are micro-batches."""

    def moved():
        torch_offload.synchronize()
        stats = torch_offload.memory_stats()
        return stats["link.bytes_to_device"], stats["link.bytes_to_host"]

    before = moved()
    for _ in range(steps):
        net(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return tuple(new - old for new, old in zip(moved(), before, strict=True))


def check_training_bytes(make, x, dtype, recomputed=False):
    """Adapters over a frozen base move what is packed, at most once forward and once backward, and nothing of it comes home.

    The least is one pass: what autograd keeps unpacked for backward is on the GPU; what is recomputed is fetched twice.
    With room for all of it nothing is fetched after the first step, but for adapters that the optimizer has changed.
    """
    net = adapted(make(24).requires_grad_(False), dtype).to(OFFLOAD)
    trained = sum(p.nbytes for p in net.parameters() if p.requires_grad)
    packed = bytes_of(net) - trained
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    model = Recomputed(net) if recomputed else net
    torch_offload.set_ring_bytes(4 * 4 * WIDTH * WIDTH)

    torch_offload.set_budget(0)
    moved_in_training(model, x, 2, optimizer)
    down, home = moved_in_training(model, x, 2, optimizer)
    assert packed <= down <= 2 * 2 * 1.05 * (packed + trained), f"{down / 2} bytes for {packed} and {trained}"
    if not recomputed:
        assert home == 2 * trained, "their gradients"

    torch_offload.set_budget(2**26)
    moved_in_training(model, x, 2)
    assert moved_in_training(model, x, 2) == (0, 0)
    moved_in_training(model, x, 1, optimizer)
    down, home = moved_in_training(model, x, 2, optimizer)
    assert down <= 3 * trained < packed + 2 * trained, "adapters, once more what is copied ahead"
    assert home == 2 * trained


def check_files(net, x, weights_only=True):
    """Files name the CPU; they come back there or on offload."""
    result = net(x)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    for location, device in (
        (None, "cpu"),
        ("cpu", "cpu"),
        ("offload", "offload"),
        (torch.device("offload", 0), "offload"),
    ):
        file.seek(0)
        state = torch.load(file, map_location=location, weights_only=weights_only)
        assert devices_in(state) == {device}
        fresh = copy.deepcopy(net)
        fresh.load_state_dict(state, assign=True)
        assert devices(fresh) == {device}
        assert_same([part.cpu() for part in opened(fresh)], [part.cpu() for part in opened(net)])
        assert_same(fresh.to(OFFLOAD)(x), result)


def check_copies(net, x):
    """Copies, moves and ``load_state_dict`` keep the packed bits."""
    result = net(x)
    twin = copy.deepcopy(net)
    assert devices(twin) == {"offload"}
    assert not {part.data_ptr() for part in opened(twin)} & {part.data_ptr() for part in opened(net)}
    assert_same(twin(x), result)
    pickled = copy.deepcopy(net)  # its state alone: torchao's modules hold a function that can't be pickled
    pickled.load_state_dict(pickle.loads(pickle.dumps(net.state_dict())), assign=True)
    assert devices(pickled) == {"offload"}
    assert_same([part.cpu() for part in opened(pickled)], [part.cpu() for part in opened(net)])
    assert_same(pickled(x), result)
    assert devices(twin.to(CPU)) == {"cpu"}
    assert_same([part.cpu() for part in opened(net)], opened(twin))
    # Into what is there, from another device.
    for value in opened(net):
        value.zero_()
    net.load_state_dict(twin.state_dict())
    assert devices(net) == {"offload"}
    assert_same(net(x), result)
    shallow = copy.copy(next(net.parameters()))
    assert shallow.device.type == "offload"
    assert [part.data_ptr() for part in parts(shallow)] == [part.data_ptr() for part in parts(next(net.parameters()))]
