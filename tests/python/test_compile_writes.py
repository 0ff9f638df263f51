"""What a compiled function read of a tensor that it then writes to."""

import pytest
import torch
import torch.nn.functional as F
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, OFFLOAD, at, data, says
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torch_offload.compile.on_device import OnDevice


def used_after(buffer, x, copied):
    value = copied(buffer, x.device)
    buffer.add_(1)
    return value * 2 + x.sum(0)


def returned(buffer, x, copied):
    value = copied(buffer, x.device).view(2, 4)
    buffer.mul_(2)
    return value, value + 1


def written_in_part(buffer, x, copied):
    value, part = copied(buffer[:4], x.device), copied(buffer[2:], x.device)
    buffer[2:6].add_(1)
    return value, part.sin(), x * buffer


def written_twice(buffer, x, copied):
    first = copied(buffer, x.device)
    buffer.copy_(x[0] * 3)
    second = x * buffer
    buffer.add_(1)
    return first, second, copied(buffer, x.device)


def to(tensor, device):
    return tensor.to(device, copy=True)


def fetch(tensor, device):
    """Which gives memory that is shared: without a graph, a copy of it is the caller's to make."""
    if tensor.device == device:
        return tensor.clone()
    fetched = torch.ops.offload.fetch(tensor, device)
    return fetched if torch.compiler.is_compiling() else fetched.clone()


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("copied", [to, fetch])
@pytest.mark.parametrize("function", [used_after, returned, written_in_part, written_twice])
def test_what_was_read_before_a_write(function, copied, backend):
    """A graph without a backward that reads a buffer and then writes to it, after graphs of programs without offload."""
    x = data(4, 8)
    compiled(torch.sin, backend)(x)
    step = compiled(function, backend)

    def run(device):
        buffer = at("cpu", 8).to(device)
        seen = [(step if device == OFFLOAD else function)(buffer, x, copied) for _ in range(3)]
        return seen, buffer

    (results, buffer), expected = run(OFFLOAD), run(COMPUTE)
    torch.testing.assert_close((results, buffer.cpu()), (expected[0], expected[1].cpu()))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
@pytest.mark.parametrize(
    "write",
    [
        lambda a, b: a.add_(b),
        lambda a, b: a.index_copy_(0, torch.tensor([2, 0], device=b.device), b[:2]),
        lambda a, b: a.lerp_(b, 0.25),
        lambda a, b: a.masked_fill_(b > 0, 3.0),
    ],
    ids=["add", "index_copy", "lerp", "masked_fill"],
)
@pytest.mark.parametrize("written", ["offload", "beside"])
def test_a_write_beside_another_device(written, write, backend):
    step = torch.compile(lambda a, b: write(a, b) * 2, backend=backend, fullgraph=True)

    def run(device):
        devices = (device, COMPUTE) if written == "offload" else (COMPUTE, device)
        a, b = (data(3, 8, seed=seed).to(device) for seed, device in enumerate(devices))
        return (step(a, b) if device == OFFLOAD else write(a, b) * 2).to(COMPUTE), a.to(COMPUTE)

    torch.testing.assert_close(run(OFFLOAD), run(COMPUTE))


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_memory_for_a_parameter(backend):
    def function(w, x):
        w.data = w.data * 2 + 1
        return w * x

    weight = torch.nn.Parameter(data(3, 8).to(OFFLOAD))
    expected = weight.detach().cpu() * 2 + 1
    x = data(3, 8, seed=1)
    y = torch.compile(function, backend=backend, fullgraph=True)(weight, x)
    torch.testing.assert_close(weight.detach().cpu(), expected)
    torch.testing.assert_close(y.detach().cpu(), expected * x.cpu())


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_a_product_that_is_written(backend):
    a, b, out = (at(OFFLOAD, *shape) for shape in ((3, 4), (4, 2), (3, 2)))
    torch.compile(lambda a, b, out: torch.matmul(a, b, out=out), backend=backend, fullgraph=True)(a, b, out)
    torch.testing.assert_close(out.cpu(), a.cpu() @ b.cpu())


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_memory_that_is_freed(backend):
    def function(x):
        y = x * 2
        x.untyped_storage().resize_(0)
        return y

    x = at(OFFLOAD, 3, 4)
    expected = x.cpu() * 2
    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(x).cpu(), expected)
    assert x.untyped_storage().nbytes() == 0
    assert x.shape == (3, 4)


WRITES = {
    "whole": lambda b: b.mul_(0.5),
    "view": lambda b: b.t().mul_(2),
    "part": lambda b: b[1:].mul_(2),
    "list": lambda b: torch._foreach_mul_([b], 3),
    "product": lambda b: b.copy_(b @ b / 4),
    "twice": lambda b: b.add_(1).mul_(b.amax()),
}


def autocast(x, b):
    with torch.autocast(x.device.type if x.device.type == "cuda" else "cpu", torch.bfloat16):
        return F.linear(x, b).float()


READS = {
    "linear": F.linear,
    "product": lambda x, b: (x @ b).tanh(),
    "elements": lambda x, b: (x * b[:4]).sin(),
    "checkpoint": lambda x, b: checkpoint(F.linear, x, b, use_reentrant=False),
    "autocast": autocast,
}


class Updating(nn.Module):
    """Writes to a buffer, or to a parameter as if it were one, and then computes with it."""

    def __init__(self, write, read, kind):
        super().__init__()
        value = at("cpu", 8, 8, seed=3)
        if kind == "buffer":
            self.register_buffer("b", value)
        else:
            self.b = nn.Parameter(value, requires_grad=kind == "trained")
        self.write, self.read, self.w = write, read, nn.Parameter(at("cpu", 8, 8, seed=4))

    def forward(self, x):
        with torch.no_grad():
            self.write(self.b)
        return F.linear(self.read(x, self.b), self.w)


@pytest.mark.parametrize("kind", ["buffer", "frozen", "trained"])
@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_gradients_behind_a_write(write, read, feed, kind):
    """A backward has the values that the forward read, and not those that the write would make of them once more."""
    check_gradients(write, read, feed, kind, "aot_eager")


@pytest.mark.parametrize("kind", ["buffer", "trained"])
@pytest.mark.parametrize("write", ["whole", "view"])
@pytest.mark.parametrize("read", ["linear", "elements"])
def test_gradients_behind_a_write_in_generated_code(write, read, kind):
    check_gradients(write, read, "plain", kind, "inductor")


def check_gradients(write, read, feed, kind, backend):
    def run(compiles):
        torch.compiler.reset()
        model = Updating(WRITES[write], READS[read], kind).to(OFFLOAD)
        step = compiled(model, backend) if compiles else model
        results = []
        for k in range(2):
            x = at(OFFLOAD if feed == "offload" else COMPUTE, 4, 8, seed=k).requires_grad_()
            y = step(x)
            y.square().sum().backward()
            results += [y, x.grad]
        return *results, *(p.grad for p in model.parameters() if p.requires_grad), model.b

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu())


def test_a_write_that_is_no_new_value_is_refused():
    """Of none that PyTorch has is a write left in a graph: a graph by hand, and the pass alone."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.mul_.Scalar, (x, 2))
    graph.output(y)
    with FakeTensorMode():
        x.meta["val"] = y.meta["val"] = torch.empty(3, 4, device=OFFLOAD)
    says(
        NotImplementedError,
        "torch.compile: aten::mul_ writes to an offload tensor (its argument self), and PyTorch has not traced the write as a "
        "new value; call it outside the compiled function.",
        lambda: OnDevice()(torch.fx.GraphModule({}, graph)),
    )


OVERLAPPING = {
    "two parts, both written": (lambda big: (big[:5], big[3:]), lambda a, b, x: (a.mul_(2), b.add_(x))),
    "a part is written": (lambda big: (big, big[3:]), lambda a, b, x: b.add_(x)),
    "the whole is written": (lambda big: (big, big[3:]), lambda a, b, x: a.add_(x)),
    "a flat one is written": (lambda big: (big.view(-1), big[2]), lambda a, b, x: a.sub_(a * 0.1)),
    "a row is replaced": (lambda big: (big, big[2]), lambda a, b, x: b.copy_(x)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", OVERLAPPING)
def test_inputs_that_overlap(how, backend):
    parts, write = OVERLAPPING[how]

    def function(a, b, x):
        write(a, b, x)
        return a.sum() + b.sum(), b * x

    step, x = compiled(function, backend), data(4)
    big, plain = at(OFFLOAD, 8, 4), at(COMPUTE, 8, 4)
    for _ in range(2):
        actual, expected = step(*parts(big), x), function(*parts(plain), x)
        torch.testing.assert_close([value.to(COMPUTE) for value in actual], list(expected))
        torch.testing.assert_close(big.to(COMPUTE), plain)


def looked_up(w, state, x):
    return F.embedding(torch.arange(4, device=x.device), w, max_norm=1.0) * x


def keys_of_a_cache(w, state, x):
    state[1:5] = x @ w
    return x @ state.t()


def overwritten(w, state, x):
    state.copy_((x @ w)[[0, 1, 2, 3, 0, 1]])
    return (x @ w) * state[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [looked_up, keys_of_a_cache, overwritten])
def test_training_what_is_written_behind_a_forward(function, backend):
    """Autograd has to see the write, so it is no part of the graph: PyTorch makes it when the graph has run."""

    def run(device):
        torch.compiler.reset()
        step, w = compiled(function, backend), at(device, 8, 8).requires_grad_()
        results = []
        for k in range(2):
            state, x = at(device, 6, 8, seed=5), at(COMPUTE, 4, 8, seed=k).requires_grad_()
            y = step(w, state, x)
            y.square().sum().backward()
            results += [y, x.grad, state]
        return *results, w, w.grad

    torch.testing.assert_close(to_compute(run(OFFLOAD)), to_compute(run(COMPUTE)))


def to_compute(values):
    return [value.to(COMPUTE) for value in tree_leaves(values)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["addcmul_", "addcdiv_"])
@pytest.mark.parametrize("target", [COMPUTE, OFFLOAD], ids=["plain", "offload"])
def test_products_that_are_added_with_a_factor(target, name, backend):
    """For which newer compilers have an operation of their own."""

    def run(device):
        torch.compiler.reset()
        written = at(device if target is OFFLOAD else COMPUTE, 4)
        other = at(COMPUTE if target is OFFLOAD else device, 4, seed=1)

        def f(g):
            getattr(written, name)(other, g, value=0.1)
            return g * written

        return compiled(f, backend)(at(COMPUTE, 4, seed=2).abs() + 1), written

    torch.testing.assert_close(to_compute(run(OFFLOAD)), to_compute(run(COMPUTE)))
