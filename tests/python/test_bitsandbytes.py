"""bitsandbytes: its packed layers and its optimizers give on offload weights what they give on the compute device.

It reaches its kernels by addresses, behind operations of its own, and knows CUDA and the CPU alone.
"""

import copy
import io
from collections import Counter

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, assert_same, at, data
from quantized_models import (  # noqa: F401
    MODES,
    WIDTH,
    bytes_of,
    check_bytes,
    check_training,
    devices_in,
    needs_cache,
    settings,
)
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

bnb = pytest.importorskip("bitsandbytes", minversion="0.50")

GPU = COMPUTE.type == "cuda"
KINDS = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nf4_nested": {"quant_type": "nf4", "compress_statistics": True},
    "fp4": {"quant_type": "fp4", "compress_statistics": False},
    "int8": {},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def layer(kind, seed):
    if kind == "int8":
        made = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    else:
        made = bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.bfloat16, **KINDS[kind])
    made.load_state_dict({"weight": at("cpu", WIDTH, WIDTH, seed=seed) / 8, "bias": at("cpu", WIDTH, seed=seed + 1)})
    return made.to(torch.bfloat16).requires_grad_(False)


def model(kind, device, count=3):
    """It is packed by the move."""
    return nn.Sequential(*[layer(kind, 2 * k) for k in range(count)]).to(device)


def inputs(seed=0):
    return data(4, WIDTH, seed=seed).to(torch.bfloat16)


class Calls(TorchDispatchMode):
    """The operations of the library's own that are called."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "bitsandbytes":
            self.counts[function.name()] += 1
        return function(*arguments, **(keywords or {}))


def seen(work):
    """The operations of the library's own that ran, and on a GPU every kernel, by name."""
    with Calls() as calls:
        work()
    if not GPU:
        return calls.counts, Counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return calls.counts, Counter(name for name in names if not name.startswith(("Mem", "offload::")))


@kinds
@pytest.mark.parametrize("mode", MODES)
def test_forward(kind, mode):
    plain, net = model(kind, COMPUTE), model(kind, OFFLOAD)
    assert {parameter.device.type for parameter in net.parameters()} == {"offload"}
    assert {net[0].weight.dtype} == {torch.int8 if kind == "int8" else torch.uint8}
    with MODES[mode]():
        for k in range(3):
            result = net(inputs(k))
            assert result.device.type == COMPUTE.type
            assert_same(result, plain(inputs(k)))


@kinds
def test_gradients_of_the_input(kind):
    found = []
    for device in (COMPUTE, OFFLOAD):
        x = inputs().requires_grad_()
        model(kind, device)(x).square().sum().backward()
        found.append(x.grad)
    assert_same(found[1], found[0])


@kinds
def test_adapters(kind):
    check_training(nn.Sequential(*[layer(kind, 2 * k) for k in range(3)]), inputs(), torch.bfloat16)


@kinds
def test_its_kernels_are_what_runs(kind):
    plain, net = model(kind, COMPUTE), model(kind, OFFLOAD)
    for warm in (plain, net):
        warm(inputs())
    with torch.no_grad():
        calls, kernels = seen(lambda: plain(inputs()))
        ours, our_kernels = seen(lambda: net(inputs()))
    assert ours == calls
    if GPU or kind != "int8":  # which the CPU has none for
        assert sum(ours.values()) >= 3, "one for each layer"
    assert our_kernels == kernels
    assert not GPU or sum(kernels.values()) >= 3


@needs_cache
@kinds
def test_bytes(kind):
    check_bytes(lambda count: model(kind, OFFLOAD, count), inputs())


@kinds
def test_copies(kind):
    net = model(kind, OFFLOAD)
    expected = net(inputs())
    twin = copy.deepcopy(net)
    assert {parameter.device.type for parameter in twin.parameters()} == {"offload"}
    assert bytes_of(twin) == bytes_of(net)
    assert_same(twin(inputs()), expected)
    assert_same(net(inputs()), expected)


@kinds
def test_files(kind):
    """They name the CPU, and hold what the resident model's would."""
    plain, net = model(kind, COMPUTE), model(kind, OFFLOAD)
    plain(inputs()), net(inputs())
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert devices_in(state) == {"cpu"}
    assert_same(state, {name: value.cpu() for name, value in plain.state_dict().items()})


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "Lion8bit", "AdamW", "SGD8bit"])
def test_optimizers(name):
    """Of weights on offload they step on the host as any other, and the state is beside the weights."""
    options = ({"min_8bit_size": 64} if "8bit" in name else {}) | ({"momentum": 0.9} if "SGD" in name else {})
    found = []
    for device in ("cpu", OFFLOAD):
        net = nn.Linear(WIDTH, WIDTH).to(device)
        with torch.no_grad():
            net.weight.copy_(at("cpu", WIDTH, WIDTH) / 8)
            net.bias.copy_(at("cpu", WIDTH, seed=1))
        optimizer = getattr(bnb.optim, name)(net.parameters(), lr=0.01, **options)
        for k in range(3):
            optimizer.zero_grad()
            twin = copy.deepcopy(net).to(COMPUTE if device == "cpu" else device)
            twin(data(4, WIDTH, seed=k)).square().mean().backward()
            for parameter, computed in zip(net.parameters(), twin.parameters(), strict=True):
                parameter.grad = computed.grad.to(device)
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        large = {value.device.type for value in states if value.numel() >= WIDTH}
        assert large == {torch.device(device).type}
        found.append([parameter.detach().cpu() for parameter in net.parameters()])
    assert_same(found[1], found[0])
