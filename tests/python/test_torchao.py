"""torchao's quantised weights: made before the model is moved or after it, they give what the resident model gives."""

import copy

import pytest
import torch
from helpers import CACHED, COMPUTE, OFFLOAD, assert_same, at, data, same
from quantized_models import (
    GROUP,
    MODES,
    WIDTH,
    adapted,
    bytes_of,
    check_bytes,
    check_copies,
    check_files,
    check_training,
    check_training_bytes,
    devices,
    moved_in_a_step,
    needs_cache,
    opened,
    settings,  # noqa: F401
    train,
)
from saving import both_ways
from torch import nn

import torch_offload

pytest.importorskip("torchao", minversion="0.17")
ao = pytest.importorskip("torchao.quantization")
granularity = pytest.importorskip("torchao.quantization.granularity")
nf4 = pytest.importorskip("torchao.dtypes.nf4tensor")


def int4_cpu():
    from torchao.prototype.quantization.int4 import Int4WeightOnlyOpaqueTensorConfig

    return Int4WeightOnlyOpaqueTensorConfig(group_size=32)


# What the machine's compute device has no kernels for is skipped.
CONFIGS = {
    "int8_weight_v1": lambda: ao.Int8WeightOnlyConfig(version=1),
    "int8_weight_v2": lambda: ao.Int8WeightOnlyConfig(version=2),
    "int8_weight_v2_groups": lambda: ao.Int8WeightOnlyConfig(granularity=granularity.PerGroup(GROUP), version=2),
    "int8_dynamic_v1": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=1),
    "int8_dynamic_v2": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
    "float8_weight": lambda: ao.Float8WeightOnlyConfig(),
    "float8_dynamic": lambda: ao.Float8DynamicActivationFloat8WeightConfig(granularity=granularity.PerRow()),
    "int4_weight": lambda: ao.Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d"),
    "int4_weight_cpu": int4_cpu,
    "int4_in_int8": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity.PerGroup(GROUP)),
    "int4_in_int8_dynamic": lambda: ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=granularity.PerGroup(GROUP)
    ),
}
configs = pytest.mark.parametrize("name", CONFIGS)
orders = pytest.mark.parametrize("moved_first", [False, True], ids=["quantize_then_move", "move_then_quantize"])
pytestmark = pytest.mark.filterwarnings("ignore:Config Deprecation", "ignore:.*deprecat")


def quantized(name, device, count=3, moved_first=False):
    """A model that is quantised where it computes and then moved, or the other way round."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)]).to(torch.bfloat16)
    resident = copy.deepcopy(net).to(COMPUTE)
    try:
        ao.quantize_(resident, CONFIGS[name]())
        resident(data(4, WIDTH).to(torch.bfloat16))
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as reason:
        pytest.skip(f"the resident model fails: {reason}".splitlines()[0])
    if not moved_first:
        return resident.to(device)
    if name == "int4_weight_cpu":
        pytest.skip("it is made of tensors on the CPU alone")
    net = net.to(device)
    ao.quantize_(net, CONFIGS[name]())
    return net


@configs
@orders
@pytest.mark.parametrize("mode", MODES)
def test_forward(name, moved_first, mode):
    def run(device):
        net = quantized(name, device, moved_first=moved_first)
        assert devices(net) == {device.type}
        x = data(5, WIDTH).to(torch.bfloat16)
        with MODES[mode]():
            y = net(x)
        return y, [part.cpu() for part in opened(net)]

    same(run)


@configs
@orders
def test_adapters(name, moved_first):
    net = quantized(name, OFFLOAD, moved_first=moved_first).requires_grad_(False)
    x = data(5, WIDTH).to(torch.bfloat16)
    try:
        train(adapted(quantized(name, COMPUTE).requires_grad_(False), torch.bfloat16).to(COMPUTE), x, 1)
    except RuntimeError as reason:
        pytest.skip(f"torchao has no derivative: {reason}".splitlines()[0])
    check_training(net, x, torch.bfloat16)


@needs_cache
@configs
@orders
def test_bytes(name, moved_first):
    x = data(4, WIDTH).to(torch.bfloat16)
    check_bytes(lambda count: quantized(name, OFFLOAD, count, moved_first), x)
    net = quantized(name, OFFLOAD)
    torch_offload.synchronize()
    before = torch_offload.memory_stats()["link.bytes_to_host"]
    with torch.no_grad():
        net(x)
    assert torch_offload.memory_stats()["link.bytes_to_host"] == before


@needs_cache
@configs
def test_bytes_of_training(name):
    """Adapters over a frozen base."""
    x = data(4, WIDTH).to(torch.bfloat16)
    try:
        train(adapted(quantized(name, COMPUTE).requires_grad_(False), torch.bfloat16).to(COMPUTE), x, 1)
    except RuntimeError as reason:
        pytest.skip(f"torchao has no derivative: {reason}".splitlines()[0])
    check_training_bytes(lambda count: quantized(name, OFFLOAD, count), x, torch.bfloat16)


@configs
@orders
def test_files_and_copies(name, moved_first):
    net = quantized(name, OFFLOAD, moved_first=moved_first)
    x = data(3, WIDTH).to(torch.bfloat16)
    check_files(net, x, weights_only=False)
    check_copies(net, x)
    assert "offload" in repr(net[0][0].weight)


@orders
def test_nf4(moved_first):
    """The tensor of QLoRA. Its class computes in an autograd Function, and its clone quantises anew."""
    nf4 = pytest.importorskip("torchao.dtypes.nf4tensor")

    def make(device, count=2):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(count)]).to(torch.bfloat16)
        net.to(device if moved_first else COMPUTE)
        for block in net:
            block[0].weight = nn.Parameter(nf4.to_nf4(block[0].weight.detach()), requires_grad=False)
            block[0].bias.requires_grad_(False)
        return net.to(device)

    x = data(3, 128).to(torch.bfloat16)

    def run(device):
        net = make(device)
        assert devices(net) == {device.type}
        fed = x.clone().requires_grad_()
        y = net(fed)
        y.square().sum().backward()
        return y, fed.grad, [part.cpu() for part in opened(net)]

    same(run)
    if CACHED:
        check_bytes(lambda count: make(OFFLOAD, count), x)


@needs_cache
@pytest.mark.parametrize("name", ["int8_weight_v1", "int8_weight_v2", "int4_in_int8"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(name, backend):
    """One graph, with the compiled resident model's bits; what travels is packed."""
    x = data(4, WIDTH).to(torch.bfloat16)
    resident, net = quantized(name, COMPUTE), quantized(name, OFFLOAD)
    torch_offload.set_budget(0)
    torch.compiler.reset()
    with torch.no_grad():
        expected = torch.compile(resident, backend=backend, fullgraph=True)(x)
        step = torch.compile(net, backend=backend, fullgraph=True)
        assert_same(step(x), expected)
    torch_offload.empty_cache()
    assert moved_in_a_step(step, x) <= 1.05 * bytes_of(net)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:.*")
def test_an_optimizer_with_quantised_state():
    """Its step is compiled over wrappers that no module holds."""
    optim = pytest.importorskip("torchao.optim")

    def run(device):
        torch.compiler.reset()
        weight = nn.Parameter(at(device, 64, 128))
        optimizer = optim.AdamW8bit([weight], lr=0.1)
        for k in range(3):
            weight.grad = at(device, 64, 128, seed=1 + k)
            optimizer.step()
        state = optimizer.state[weight]
        assert state["exp_avg"].codes.device.type == weight.device.type == device.type
        values = weight.detach(), state["exp_avg"].codes, state["exp_avg_sq"].codes
        return [value.to(COMPUTE) for value in values]

    # Kernels that are generated for another graph may round a last bit otherwise, and a code then.
    (weight, *codes), (expected, *expected_codes) = run(OFFLOAD), run(COMPUTE)
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(codes, expected_codes, strict=True):
        assert (one.int() - other.int()).abs().max() <= 1
        assert (one != other).float().mean() <= 0.01


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["int8_weight_only_quantized_training", "bitnet_training"])
def test_trained_weights_that_are_quantised(name, backend):
    """Their gradients, which a Function of torchao's makes beside the activations, come home."""
    training = pytest.importorskip("torchao.prototype.quantized_training")

    def run(device):
        torch.compiler.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
        ao.quantize_(net, getattr(training, name)())
        net.to(device)
        call = net if backend is None else torch.compile(net, backend=backend)
        for k in range(2):
            x = data(5, WIDTH, seed=k).requires_grad_()
            y = call(x)
            y.square().sum().backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        assert {gradient.device.type for gradient in gradients} == {device.type}
        return y, x.grad, gradients

    same(run)


class SavesItsWeight(torch.autograd.Function):
    """NF4's product, by somebody who saves the packed weight instead of keeping it on ``ctx``."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return nf4.linear_nf4(x.detach(), weight)

    @staticmethod
    def backward(ctx, grad):
        _, weight = ctx.saved_tensors
        return grad @ weight.get_original_weight(), None


@pytest.mark.parametrize("product", [nf4.linear_nf4, SavesItsWeight.apply], ids=["kept", "saved"])
def test_nf4_beside_saved_tensors(product):
    """The frozen base of QLoRA, on either device; what its adapters save goes to the host."""
    packed = nf4.to_nf4(data(128, 128))

    def run(device, region, before_backward):
        weight = packed.to(device)
        down, up = data(4, 128, seed=1).to(device).requires_grad_(), data(128, 4, seed=2).to(device).requires_grad_()
        x = data(16, 128).requires_grad_()
        with region():
            hidden = product(x, weight) + x @ down.t() @ up.t()
            y = product(hidden.sigmoid(), weight).tanh().square().mean()
        before_backward()
        y.backward()
        return y, x.grad, down.grad, up.grad

    both_ways(run)
