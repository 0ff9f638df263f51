"""Quantised weights: what crosses the link is packed, results and gradients are the resident model's.

Plain packed parameters that their module unpacks, wrappers (tensor subclasses) of packed parts, and PyTorch's own quantised
tensors, which offload refuses. `test_torchao.py` has torchao's wrappers.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import CACHED, COMPUTE, CPU, OFFLOAD, assert_same, at, data, same
from quantized_models import (
    GROUP,
    MODES,
    WIDTH,
    bytes_of,
    check_bytes,
    check_copies,
    check_files,
    check_training,
    check_training_bytes,
    devices,
    needs_cache,
    opened,
    parts,
    settings,  # noqa: F401
)
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torch_offload


def frozen(value):
    return nn.Parameter(value, requires_grad=False)


def nearest(w, table):
    return (w.unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)


def pairs(q):
    """Two values of four bits in each byte."""
    return q[..., ::2] << 4 | q[..., 1::2]


class Int8(nn.Module):
    def __init__(self, w):
        super().__init__()
        scale = w.abs().amax(-1, keepdim=True) / 127
        self.q, self.scale = frozen((w / scale).round().to(torch.int8)), frozen(scale)

    def forward(self, x):
        return F.linear(x, self.q.to(x.dtype) * self.scale)


class UInt8(nn.Module):
    def __init__(self, w):
        super().__init__()
        low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
        self.low, self.scale = frozen(low), frozen((high - low) / 255)
        self.q = frozen(((w - low) / self.scale).round().to(torch.uint8))

    def forward(self, x):
        return x @ (self.q.float() * self.scale + self.low).to(x.dtype).t()


class Float8(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.q = frozen(w.to(torch.float8_e4m3fn))

    def forward(self, x):
        return F.linear(x, self.q.to(x.dtype))


class Int4(nn.Module):
    """Two to a byte, with a scale for each group."""

    def __init__(self, w):
        super().__init__()
        groups = w.reshape(len(w), -1, GROUP)
        self.scale = frozen(groups.abs().amax(-1, keepdim=True) / 7)
        self.packed = frozen(pairs(((groups / self.scale).round() + 8).to(torch.uint8)))

    def forward(self, x):
        q = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten(-2)
        return F.linear(x, ((q.to(x.dtype) - 8) * self.scale).flatten(-2))


class Table(nn.Module):
    """Two to a byte: places in a table of sixteen values, as NF4 has it."""

    def __init__(self, w):
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, 16, dtype=w.dtype).sinh())
        groups = w.reshape(len(w), -1, GROUP)
        self.scale = frozen(groups.abs().amax(-1, keepdim=True) / self.table[-1])
        self.packed = frozen(pairs(nearest(groups / self.scale, self.table)))

    def forward(self, x):
        q = self.packed.int()
        q = torch.stack([q >> 4, q & 15], -1).flatten(-2)
        return F.linear(x, (self.table[q] * self.scale).flatten(-2))


class Pair(torch.Tensor):
    """A wrapper that computes in ``__torch_dispatch__``: integers and a scale for each row."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, q, scale, transposed=False):
        shape = q.shape[::-1] if transposed else q.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=q.device)

    def __init__(self, q, scale, transposed=False):
        self.q, self.scale, self.transposed = q, scale, transposed

    @classmethod
    def of(cls, w):
        scale = w.abs().amax(-1, keepdim=True) / 127
        return cls((w / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["q", "scale"], {"transposed": self.transposed}

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["q"], parts["scale"], context["transposed"])

    def __repr__(self):
        return f"{type(self).__name__}(q={self.q}, scale={self.scale})"

    def opened(self):
        w = self.q.to(self.scale.dtype) * self.scale
        return w.t() if self.transposed else w

    def each(self, function, transposed=None):
        return type(self)(function(self.q), function(self.scale), self.transposed if transposed is None else transposed)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return args[0].each(lambda part: func(part, **kwargs))
        if func is aten._to_copy.default:
            assert kwargs.get("dtype") in (None, args[0].dtype)
            return args[0].each(lambda part: part.to(kwargs["device"]))
        if func is aten.t.default:
            return args[0].each(lambda part: part, not args[0].transposed)
        if func is aten.copy_.default:
            args[0].q.copy_(args[1].q)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        assert func in (aten.mm.default, aten.addmm.default, aten.linear.default), func
        return func(*[value.opened() if isinstance(value, Pair) else value for value in args], **kwargs)


class Handled(Pair):
    """The same, but it computes in ``__torch_function__``, as torchao does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, w, *bias = args
            # The device that the author of such a class asks for; and what only has a kernel for it.
            assert w.device.type == x.device.type == w.q.device.type, "a part is elsewhere"
            return F.linear(x, w.q.to(x.dtype), None) * w.scale.flatten() + (
                bias[0] if bias and bias[0] is not None else 0
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Nested(Handled):
    """A wrapper whose part is one: torchao's weights with dynamically quantised activations."""

    @staticmethod
    def __new__(cls, inner, device):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=device)

    def __init__(self, inner, device):
        self.inner = inner
        self.told = device

    @classmethod
    def of(cls, w):
        return cls(Handled.of(w), w.device)

    def __tensor_flatten__(self):
        return ["inner"], {"device": self.told}

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["inner"], context["device"])

    def __repr__(self):
        return f"Nested({self.inner})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            assert args[1].device == args[0].device
            return F.linear(args[0], args[1].inner, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            args[0].inner.copy_(args[1].inner)
            return args[0]
        inner = func(args[0].inner, **(kwargs or {}))
        return cls(inner, inner.device)


def wrapped(kind):
    def make(w):
        layer = nn.Linear(WIDTH, WIDTH, dtype=w.dtype)
        layer.weight = frozen(kind.of(w))
        layer.bias.requires_grad_(False)
        return layer

    return make


PLAIN = {"int8": Int8, "uint8": UInt8, "float8": Float8, "int4": Int4, "table": Table}
WRAPPED = {"dispatch": wrapped(Pair), "function": wrapped(Handled), "nested": wrapped(Nested)}
KINDS = {**PLAIN, **WRAPPED}
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def base(kind, count=3, dtype=torch.float32):
    torch.manual_seed(0)
    make = KINDS[kind]
    return nn.Sequential(
        *[nn.Sequential(make(at(CPU, WIDTH, WIDTH, seed=k).to(dtype)), nn.GELU()) for k in range(count)]
    )


@kinds
@dtypes
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_forward(kind, dtype, mode, feed):
    def run(device):
        net = base(kind, dtype=dtype).to(device)
        x = data(5, WIDTH).to(dtype).to(device if feed == "offload" else COMPUTE)
        with MODES[mode]():
            y = net(x)
        assert y.device.type == x.device.type
        return y

    same(run)


@kinds
@dtypes
def test_adapters_over_a_frozen_base(kind, dtype):
    check_training(base(kind, dtype=dtype), data(5, WIDTH).to(dtype), dtype)


@needs_cache
@kinds
@dtypes
def test_only_packed_bytes_cross_the_link(kind, dtype):
    check_bytes(lambda count: base(kind, count, dtype), data(4, WIDTH).to(dtype))


@needs_cache
@kinds
@dtypes
def test_only_packed_bytes_cross_the_link_in_training(kind, dtype):
    """What a plain module unpacks is a result: without room it goes home until its backward, unless that unpacks again."""
    check_training_bytes(lambda count: base(kind, count, dtype), data(4, WIDTH).to(dtype), dtype, kind in PLAIN)


@needs_cache
@pytest.mark.parametrize("kind", WRAPPED)
def test_what_a_wrapper_unpacks_never_comes_home(kind):
    net = base(kind).to(OFFLOAD)
    x = data(4, WIDTH)
    torch_offload.set_budget(0)
    before = torch_offload.memory_stats()["link.bytes_to_host"]
    with torch.no_grad():
        net(x)
    assert torch_offload.memory_stats()["link.bytes_to_host"] == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_unpacking_is_done_where_new_values_are(mode, dtype):
    byte = torch.arange(16).to(dtype).to(OFFLOAD)
    fetches = []

    def cast(to):
        before = torch_offload.memory_stats()["cache.fetches"]
        result = byte.to(to)
        fetches.append(torch_offload.memory_stats()["cache.fetches"] - before)
        assert_same(result, byte.cpu().to(to))

    with MODES[mode]():
        cast(torch.float32)
        cast(torch.int32)
        cast(torch.bool)
        with torch_offload.on_host():
            cast(torch.float32)
    assert fetches == [int(CACHED), int(CACHED and not dtype.is_floating_point), 0, 0]


@kinds
def test_files(kind):
    with torch.serialization.safe_globals([Pair, Handled, Nested]):
        check_files(base(kind).to(OFFLOAD), data(3, WIDTH))


@kinds
def test_copies(kind):
    check_copies(base(kind).to(OFFLOAD), data(3, WIDTH))


@pytest.mark.parametrize("kind", WRAPPED)
def test_parameters_stay_the_same_objects(kind):
    net = base(kind)
    before = list(map(id, net.parameters()))
    assert list(map(id, net.to(OFFLOAD).parameters())) == before
    assert devices(net) == {"offload"}
    assert "offload" in repr(next(net.parameters()))


@pytest.mark.parametrize("kind", WRAPPED)
def test_parts_are_parameters(kind):
    before = torch_offload.memory_stats()["host.parameter_count.current"]
    net = base(kind, 2).to(OFFLOAD)
    assert torch_offload.memory_stats()["host.parameter_count.current"] - before == len(opened(net))


def trained(kind, biased=True):
    """Two layers."""
    if kind == "dispatch":
        net = base(kind, 2).requires_grad_(True)
    else:  # PyTorch's own class of two tensors of one shape, of which each is computed with for itself
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)])
        for k, layer in enumerate(net):
            two = TwoTensor(at(CPU, WIDTH, WIDTH, seed=k), at(CPU, WIDTH, WIDTH, seed=9 + k))
            layer[0].weight = nn.Parameter(two)
    if not biased:
        for layer in net:
            layer[0].bias = None
    return net


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("kind", ["dispatch", "two"])
def test_a_trained_wrapper(kind, feed, biased, backend):
    """Its gradient, and that of the bias beside it, come home."""

    def run(device):
        torch.compiler.reset()
        net = trained(kind, biased).to(device)
        call = net if backend is None else torch.compile(net, backend=backend, fullgraph=True)
        for k in range(2):
            x = at(device if feed == "offload" else COMPUTE, 3, WIDTH, seed=k).requires_grad_()
            y = call(x)
            y.square().sum().backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        assert all(part.device.type == device.type for gradient in gradients for part in parts(gradient))
        return [parts(value) for value in (y, x.grad, *gradients)]

    same(run)


@needs_cache
@pytest.mark.parametrize("kind", ["dispatch", "two"])
def test_a_trained_wrapper_travels_packed(kind):
    net = trained(kind).to(OFFLOAD)
    torch_offload.set_budget(0)
    before = torch_offload.memory_stats()["link.bytes_to_device"]
    net(data(3, WIDTH))
    assert torch_offload.memory_stats()["link.bytes_to_device"] - before <= 1.05 * bytes_of(net)


class Rounded(Pair):
    """State of an optimizer, as torchao's: a step reads it, and copies a plain tensor to it."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.lerp.Scalar:
            return func(*[value.opened() if isinstance(value, Pair) else value for value in args])
        if func is aten.copy_.default and not isinstance(args[1], Pair):
            args = (args[0], cls.of(args[1]))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_over_a_wrapper(backend):
    """Which no module holds, as the state of an optimizer."""

    def step(weight, state, gradient):
        moved = state.lerp(gradient, 0.25)
        state.copy_(moved)
        weight.sub_(moved, alpha=0.5)

    def run(device):
        weight, state = at(device, 4, 8), Rounded.of(at(device, 4, 8, seed=1))
        torch.compiler.reset()
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
        for k in range(3):
            compiled(weight, state, at(device, 4, 8, seed=2 + k))
        assert {weight.device.type, state.q.device.type, state.scale.device.type} == {device.type}
        return weight, state.q, state.scale

    same(run)


class Product(torch.autograd.Function):
    """A product whose author, as that of NF4's, keeps the wrapper and computes the gradient himself."""

    @staticmethod
    def forward(ctx, x, w):
        assert w.device.type == x.device.type
        ctx.w = w
        return x @ w.opened().t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.w.opened(), None


def test_a_function_gets_a_wrapper_beside_activations():
    def run(device):
        w = base("dispatch", 1).to(device)[0][0].weight
        x = data(3, WIDTH).requires_grad_()
        y = Product.apply(x, w)
        y.square().sum().backward()
        return y, x.grad

    same(run)


# PyTorch's own quantised tensors.

REFUSED = r"offload: a tensor of PyTorch's own quantised dtype Q\w+ can't live on the offload device"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8).to(OFFLOAD),
        lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8).to(OFFLOAD),
        lambda: torch.quantize_per_tensor(torch.ones(2, 2).to(OFFLOAD), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_tensor_dynamic(torch.ones(2, 2).to(OFFLOAD), torch.quint8, False),
        lambda: torch._make_per_tensor_quantized_tensor(torch.ones(2, dtype=torch.int8).to(OFFLOAD), 0.1, 0),
        lambda: torch._empty_affine_quantized([2], scale=0.1, zero_point=0, dtype=torch.qint8, device=OFFLOAD),
        lambda: torch.empty(2, dtype=torch.qint32, device=OFFLOAD),
        lambda: torch.empty(2, 2).to(OFFLOAD).copy_(torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)),
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).to(OFFLOAD), {nn.Linear}),
    ],
    ids=["to", "to_per_channel", "quantize", "quantize_dynamic", "make", "empty", "empty_dtype", "copy_", "module"],
)
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:.*TypedStorage")
def test_quantised_tensors_of_pytorch_are_refused(make):
    with pytest.raises(RuntimeError, match=REFUSED):
        make()


@pytest.mark.skipif(COMPUTE.type != "cpu", reason="they compute on the CPU alone")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_dynamically_quantised_modules_compute_on_the_cpu():
    net = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {nn.Linear}, dtype=torch.qint8
    )
    x = data(3, 4)
    expected = net(x)
    assert_same((net.to(OFFLOAD)(x), net(x.to(OFFLOAD))), (expected, expected))
