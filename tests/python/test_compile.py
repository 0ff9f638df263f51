"""torch.compile over offload tensors: one graph, and the results of the plain device's graph, bit by bit."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, GPU, OFFLOAD, SIM, assert_same, at, data, grads, passes, values
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

BACKENDS = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, backend, **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


class Norms(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.RMSNorm(8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.GroupNorm(2, 16), nn.Linear(16, 4)
        )


class Convolutions(nn.Sequential):
    """Batch norm writes to buffers that its schema doesn't name."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
        )


class Transformer(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


class Elementwise(nn.Module):
    """Parameters beside activations, parameters alone, and a buffer that is written to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean.add_(x.detach().mean(0))
        return x * (self.a + self.b.exp()) + self.mean


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.outer = nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        with torch.autocast(COMPUTE.type, dtype=torch.bfloat16):
            return self.inner(x)


class Adapter(nn.Module):
    """LoRA: a frozen weight, and two small ones that are trained."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Fed(nn.Module):
    """Moves its input to where its parameters are: then activations are on offload, too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        return self.inner(x.to(self.inner[0].weight.device))


MODELS = {
    "norms": (Norms, (4, 8)),
    "convolutions": (Convolutions, (2, 3, 6, 6)),
    "transformer": (Transformer, None),
    "elementwise": (Elementwise, (4, 8)),
    "checkpointed": (Checkpointed, (4, 8)),
    "autocast": (Autocast, (4, 8)),
    "adapter": (Adapter, (4, 8)),
    "fed": (Fed, (4, 8)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_training(name, backend):
    """Three steps; the optimizer changes host bytes in between, and the next step reads the new ones."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x = data(*shape) if shape else torch.arange(10).reshape(2, 5).to(COMPUTE)

    def run(device):
        torch.compiler.reset()
        trained = copy.deepcopy(model).to(device)
        step = compiled(trained, backend)
        optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            y = step(x)
            y.float().square().mean().backward()
            seen.append((y.detach().cpu(), {name: g.cpu() for name, g in grads(trained).items() if g is not None}))
            if device == COMPUTE:
                trained.cpu()  # the optimizer's bits are the host's
            optimizer.step()
            trained.to(device)
        return seen, values(trained)

    assert_same(run(OFFLOAD), run(COMPUTE))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference(backend):
    torch.manual_seed(0)
    plain = Transformer().eval().to(COMPUTE)
    model = copy.deepcopy(plain).to(OFFLOAD)
    tokens = torch.arange(10).reshape(2, 5).to(COMPUTE)
    with torch.inference_mode():
        expected = compiled(plain, backend)(tokens)
        for _ in range(3):
            result = compiled(model, backend)(tokens)
            assert result.device.type == COMPUTE.type
            assert_same(result, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offload_tensors_alone(backend):
    def f(a, b):
        return (a @ b).relu() + a.sum(), a.clone(), torch.ones(3, device=a.device) * 2, a.t(), torch.sort(b)

    a, b = at(OFFLOAD, 4, 4), at(OFFLOAD, 4, 4, seed=1)
    for result, expected in zip(compiled(f, backend)(a, b), f(a, b), strict=True):
        for one, other in zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]:
            assert one.device.type == "offload"
            torch.testing.assert_close(one.cpu(), other.cpu())


@pytest.mark.parametrize("backend", BACKENDS)
def test_offload_tensors_inside_of_a_graph(backend):
    def f(x):
        return x * torch.arange(4.0, device=OFFLOAD).exp() + torch.ones(4, device=OFFLOAD)

    x = data(4)
    torch.testing.assert_close(compiled(f, backend)(x), f(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_to_what_others_read(backend):
    """A compiler may let an operation write into an operand that it needs no more, and what was fetched has other readers."""
    index = torch.tensor([1], device=COMPUTE)
    weight, cache = torch.zeros(6, 4, device=OFFLOAD), torch.zeros(6, 4, device=OFFLOAD)

    def put(x, weight):
        return torch.index_put(weight, (index,), x), torch.slice_scatter(weight, x[None], 0, 2, 3)

    def keep(x, cache):
        cache[2:4] = x
        return cache.sum(0) * x

    put, keep = compiled(put, backend), compiled(keep, backend)
    for k in (1.0, 2.0):
        x = torch.full((4,), k, device=COMPUTE)
        for result in put(x, weight):
            assert result.sum().item() == 4 * k
        assert keep(x, cache).tolist() == [2 * k * k] * 4
        assert cache.sum().item() == 8 * k
        assert weight.abs().sum().item() == 0
        assert torch.ops.offload.fetch(weight, torch.device("cpu:0") if SIM else COMPUTE).abs().sum().item() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_of_what_others_read_is_not_reused(backend):
    def f(x, weight):
        return (x + weight) * 2

    x, weight = data(6, 4), at(OFFLOAD, 6, 4, seed=1)
    expected = (x + weight.to(COMPUTE)) * 2
    step = compiled(f, backend)
    for _ in range(3):
        assert_same(step(x, weight), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_that_is_stashed_and_returned(backend):
    """The caller may write to it."""
    x, w = data(4).requires_grad_(), at(OFFLOAD, 4).requires_grad_()
    compiled(lambda x, w: (x + w).sin(), backend)(x, w).sum().backward()
    expected = x.grad.clone()
    x.grad.zero_()
    assert_same(w.grad, expected)


class Decaying(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(at("cpu", 8))
        self.register_buffer("scale", at("cpu", 8, seed=1))

    def forward(self, x):
        y = (x * self.scale).sin() * self.weight
        with torch.no_grad():
            self.scale.mul_(0.5)
        return y


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_that_changes_after_its_use(backend):
    """What backward needs is what forward read, and no longer what the buffer holds."""
    x = data(4, 8)
    plain, model = Decaying().to(COMPUTE), Decaying().to(OFFLOAD)
    step = compiled(model, backend)
    for _ in range(2):
        plain.zero_grad(), model.zero_grad()
        plain(x).sum().backward()
        step(x).sum().backward()
        torch.testing.assert_close(model.weight.grad.cpu(), plain.weight.grad.cpu())
        assert_same(model.scale, plain.scale)


class Replaced(Decaying):
    """What is written doesn't depend on what is read."""

    def forward(self, x):
        sines = (x * self.scale).sin()
        with torch.no_grad():
            self.scale.copy_(x.mean(0))
        return (sines @ sines.t()) @ (x * self.weight) + sines


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_that_is_replaced_after_its_use(backend, inference):
    x = data(4, 8)
    plain, model = Replaced().to(COMPUTE), Replaced().to(OFFLOAD)
    step = compiled(model, backend)
    for _ in range(2):
        with torch.set_grad_enabled(not inference):
            expected, actual = plain(x), step(x)
        torch.testing.assert_close(actual.cpu(), expected.cpu())
        assert_same(model.scale, plain.scale)
        if not inference:
            plain.zero_grad(), model.zero_grad()
            expected.sum().backward(), actual.sum().backward()
            torch.testing.assert_close(model.weight.grad.cpu(), plain.weight.grad.cpu())


def test_fetches_are_not_saved():
    saved = []

    def pack(tensor):
        saved.append(tensor.device.type if tensor.shape == (64, 64) else None)
        return tensor

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False)).to(OFFLOAD)
    step = compiled(model, "aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = step(data(4, 64).requires_grad_())
    assert saved.count("offload") == 2
    assert COMPUTE.type not in saved
    y.sum().backward()


def test_no_recompilation():
    """Neither the budget nor new weights nor new values of sizes are part of a graph."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(OFFLOAD)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    first = step(data(3, 8))
    torch.offload.set_budget(0)
    try:
        assert_same(step(data(3, 8)), first)
    finally:
        torch.offload.set_budget("auto")
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    assert_same(step(data(3, 8)), first * 2)
    model.load_state_dict({name: value.to(OFFLOAD) for name, value in model.state_dict().items()}, assign=True)
    assert_same(step(data(3, 8)), first * 2)
    assert_same(step(data(5, 8)), model(data(5, 8)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=str)
def test_an_optimizers_step(kind, options):
    def run(device):
        torch.compiler.reset()
        parameters = [at("cpu", 8, 8).to(device).requires_grad_(), at("cpu", 3, seed=1).to(device).requires_grad_()]
        optimizer = kind(parameters, lr=0.1, **options)
        step = torch.compile(optimizer.step, backend="aot_eager")
        for k in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, k + 1)
            step()
        return parameters

    for result, expected in zip(run(OFFLOAD), run(COMPUTE), strict=True):
        assert result.device.type == "offload"
        assert_same(result, expected)


def test_export():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(OFFLOAD)
    x = data(2, 8)
    exported = torch.export.export(model, (x,))
    assert_same(exported.module()(x), model(x))


def test_no_package_of_aot_inductor(tmp_path):
    model = nn.Linear(8, 8).to(OFFLOAD)
    exported = torch.export.export(model, (data(2, 8),))
    with pytest.raises(Exception, match="AOTInductor packages code without Python, and weights on offload need"):
        torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    assert_same(torch.compile(model, fullgraph=True)(data(2, 8)), model(data(2, 8)))


def test_meta_models():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.to_empty(device=OFFLOAD)
    nn.init.ones_(model.weight)
    assert model.weight.device.type == "offload"
    assert F.linear(data(2, 4), model.weight).device.type == COMPUTE.type


@pytest.mark.parametrize("grad", [False, True], ids=["value", "differentiable"])
@pytest.mark.parametrize("name", ["fetch", "stash", "copy", "give", "write_"])
def test_opcheck(name, grad):
    if grad and name in ("give", "write_"):
        pytest.skip("graphs call it, below autograd")
    offload, plain = at(OFFLOAD, 4, 3).requires_grad_(grad), data(4, 3).requires_grad_(grad)
    target = torch.device("cpu:0") if SIM else COMPUTE
    arguments = {
        "fetch": (offload, target),
        "stash": (plain, OFFLOAD),
        "copy": (offload, OFFLOAD),
        "give": (plain, OFFLOAD),
        "write_": (offload, plain),
    }[name]
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    # PyTorch has that one for operands on the CPU, CUDA and XPU.
    tests += [] if grad and name in ("fetch", "copy") else ["test_autograd_registration"]
    op = getattr(torch.ops.offload, "stash" if name == "copy" else name).default
    torch.library.opcheck(op, arguments, test_utils=tests)


def test_kernels_know_that_what_is_fetched_is_aligned():
    """And get it aligned, also where a later weight isn't."""
    memory, x = at(OFFLOAD, 9, 9), data(9)

    def function(w):
        return (w * 2).sin() + x

    step = compiled(function, "inductor")
    _, (code,) = run_and_get_code(step, memory[0])
    assert re.search(r"assert_alignment\(buf\d+, 16, 'torch.ops.offload.fetch", code)
    for row in (1, 4):
        torch.testing.assert_close(step(memory[row]), function(memory[row]))


def test_an_aligned_fetch_of_what_is_not():
    memory = at(OFFLOAD, 8, 9)
    target = torch.device("cpu:0") if SIM else COMPUTE
    for source in (memory, memory[1], memory[1:, 1], memory.t()[3:, 2:], memory[3].expand(4, 9), memory[1, :0]):
        fetched = torch.ops.offload.fetch.aligned(source, target, alignment=16)
        assert fetched.data_ptr() % 16 == 0
        assert fetched.stride() == source.stride()
        assert_same(fetched, source)


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "gaps": lambda t: t[:, ::2],
    "a part": lambda t: t[1:3],
    "transposed with gaps": lambda t: t[::2, ::3].t(),
    "expanded": lambda t: t[:, :1].expand(4, 5),
    "expanded scalar": lambda t: t.new_ones(()).expand(4, 5),
    "channels last": lambda t: t.reshape(1, 2, 2, 6).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", ["fetch", "stash", "give"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_opcheck_of_layouts(name, layout):
    source, target = (OFFLOAD, torch.device("cpu:0") if SIM else COMPUTE) if name == "fetch" else (COMPUTE, OFFLOAD)
    value, op = layout(at(source, 4, 6)), getattr(torch.ops.offload, name).default
    torch.library.opcheck(op, (value, target), test_utils=["test_schema", "test_faketensor"])
    assert_same(op(value, target), value)


def test_stash_of_what_is_on_offload_is_a_copy():
    source = at(OFFLOAD, 3).requires_grad_()
    copy = torch.ops.offload.stash(source, OFFLOAD)
    assert copy.data_ptr() != source.data_ptr()
    (copy * copy).sum().backward()
    assert_same(source.grad, source.detach() + source.detach())
    with torch.no_grad():
        source.zero_()
    assert_same(copy.detach(), at("cpu", 3))


def test_another_inductor_is_refused():
    told = passes(
        """
        import torch, torch_offload
        from torch._inductor.fx_passes import post_grad
        del post_grad.get_all_devices
        model = torch.nn.Linear(4, 4).to("offload")
        x = torch.ones(2, 4).to("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.compile(model)(x)
        except Exception as error:
            print(error)
        torch.compiler.reset()
        print(torch.equal(torch.compile(model, backend="aot_eager")(x), model(x)))
        """
    )
    assert "torch_offload: inductor has changed in torch" in told
    assert told.splitlines()[-1] == "True"


def test_another_inductor_is_no_concern_of_others():
    told = passes(
        """
        import torch, torch_offload
        from torch._inductor.fx_passes import post_grad
        original = post_grad.get_all_devices
        from torch._inductor.graph import GraphLowering
        del GraphLowering.find_nodes_prefer_channels_last
        from torch_offload.compile import inductor
        inductor.register()
        print(post_grad.get_all_devices is original)
        """
    )
    assert told.split() == ["True"]


def test_a_second_process_takes_what_the_first_has_compiled(tmp_path):
    program = """
        import torch, torch_offload
        from torch._dynamo.utils import counters
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).to("offload")
        x = torch.ones(2, 8).to("cuda" if torch.cuda.is_available() else "cpu")
        step = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            print(torch.allclose(step(x), model(x)), counters["inductor"]["fxgraph_cache_hit"] > 0)
    """

    def run(**environment):
        return passes(program, timeout=300, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), **environment).split()

    assert run() == ["True", "False"]
    assert run() == ["True", "True"]
    if not GPU:  # another device that computes
        assert run(TORCH_OFFLOAD_LINK="none" if SIM else "sim") == ["True", "False"]
