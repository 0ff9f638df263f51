"""torch.compile over offload tensors: one graph, and the results of the plain device's graph, bit by bit."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, GPU, OFFLOAD, SIM, Scaled, assert_same, at, data, grads, passes, same, values
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from torch_offload.compile.fakes import code_of


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
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}], ids=str)
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
        if GPU and kind is torch.optim.AdamW:
            torch.testing.assert_close(result.cpu(), expected.cpu())  # which rounds differently in a graph
        else:
            assert_same(result, expected)


def test_export():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(OFFLOAD)
    x = data(2, 8)
    exported = torch.export.export(model, (x,))
    assert_same(exported.module()(x), model(x))


@pytest.mark.parametrize("kind", [Norms, Transformer])
def test_an_exported_program(kind):
    """It holds the operations as they were called, on weights of offload, which are fetched when it runs or is compiled.

    The truth is the plain model's program: PyTorch exports no fused layer of a transformer, which eager inference has.
    """
    torch.manual_seed(0)
    plain = kind().eval().to(COMPUTE)
    model = copy.deepcopy(plain).to(OFFLOAD)
    x = torch.arange(10).reshape(2, 5).to(COMPUTE) if kind is Transformer else data(4, 8)
    buffer = io.BytesIO()

    def run(program):
        return [program.module()(x), compiled(program.module(), "aot_eager")(x)]

    with torch.no_grad():
        expected, exported = run(torch.export.export(plain, (x,))), torch.export.export(model, (x,))
        torch.export.save(exported, buffer)
        buffer.seek(0)
        for program in (exported, torch.export.load(buffer)):
            assert {value.device.type for value in program.state_dict.values()} == {"offload"}
            results = run(program)
            assert {result.device.type for result in results} == {COMPUTE.type}
            assert_same(results, expected)


def test_no_package_of_aot_inductor(tmp_path):
    model = nn.Linear(8, 8).to(OFFLOAD)
    exported = torch.export.export(model, (data(2, 8),))
    with pytest.raises(Exception, match="AOTInductor packages code without Python, and weights on offload need"):
        torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    assert_same(torch.compile(model, fullgraph=True)(data(2, 8)), model(data(2, 8)))


def test_weights_loaded_into_a_meta_model():
    torch.manual_seed(0)
    plain = Norms().to(COMPUTE)
    with torch.device("meta"):
        model = Norms()
    model.to_empty(device=OFFLOAD)
    model.load_state_dict(plain.state_dict())
    assert {parameter.device.type for parameter in model.parameters()} == {"offload"}
    x = data(4, 8)
    assert_same(model(x), plain(x))
    assert_same(compiled(model, "aot_eager")(x), compiled(plain, "aot_eager")(x))


FAKE_MODELS = {
    "linear": (lambda: nn.Linear(8, 4, dtype=torch.bfloat16), lambda: torch.empty(3, 8, dtype=torch.bfloat16), (3, 4)),
    "convolution": (lambda: nn.Conv2d(3, 5, 3), lambda: torch.empty(2, 3, 6, 6), (2, 5, 4, 4)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: torch.empty(2, 5, 8),
        (2, 5, 8),
    ),
}


@pytest.mark.parametrize(("make", "feed", "shape"), FAKE_MODELS.values(), ids=FAKE_MODELS)
def test_fake_models(make, feed, shape):
    """Planners of memory run a model on fake tensors: results are where the real ones would be, and gradients at home."""
    with FakeTensorMode():
        x = feed().to(COMPUTE)
        with torch.device(OFFLOAD):  # PyTorch itself moves no module of fake parameters
            model = make()
        y = model(x)
        assert isinstance(y, FakeTensor)
        assert (y.shape, y.dtype, y.device.type) == (shape, x.dtype, COMPUTE.type)
        y.sum().backward()
        for name, gradient in grads(model).items():
            assert isinstance(gradient, FakeTensor), name


def test_operations_on_fake_tensors():
    with FakeTensorMode():
        offload, plain = torch.empty(3, 4, device=OFFLOAD).t(), torch.empty(3, 4, device=COMPUTE).t()
        ops, target = torch.ops.offload, torch.device("cpu:0") if SIM else COMPUTE
        results = {
            COMPUTE: [ops.fetch(offload, target), ops.fetch.coded(offload, *code_of(target), 16)],
            OFFLOAD: [
                *(ops.stash(plain, OFFLOAD), ops.stash(offload, OFFLOAD), ops.give(plain, OFFLOAD)),
                *(ops.stash.coded(plain, 0), ops.give.coded(plain, 0)),
            ],
        }
    for device, tensors in results.items():
        for tensor in tensors:
            assert isinstance(tensor, FakeTensor)
            assert tensor.device.type == device.type
            assert (tensor.shape, tensor.stride(), tensor.dtype) == ((4, 3), (1, 4), torch.float32)


def test_meta_models():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.to_empty(device=OFFLOAD)
    nn.init.ones_(model.weight)
    assert model.weight.device.type == "offload"
    assert F.linear(data(2, 4), model.weight).device.type == COMPUTE.type


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_users_function(backend):
    """Its backward knows nothing of offload, and returns a gradient from where it computed."""

    def run(device):
        torch.compiler.reset()
        x, weight = data(3, 4).requires_grad_(), at("cpu", 4).to(device).requires_grad_()
        y = compiled(lambda x, w: Scaled.apply(x, w).sin().sum(), backend)(x, weight)
        y.backward()
        assert weight.grad.device == weight.device
        return y, x.grad, weight.grad

    same(run)


CHANGES = {
    "function": "from torch._inductor.fx_passes import post_grad; del post_grad.get_all_devices",
    "name": "import torch._inductor.compile_fx; del torch._inductor.lowering.register_lowering",
    "parameters": "from torch._inductor.scheduler import Scheduler; Scheduler.should_partition = lambda self, other: None",
    "constructor": "from torch._inductor.ir import FallbackKernel; FallbackKernel.__init__ = lambda self, layout: None",
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_inductor_is_refused(change):
    told = passes(
        f"""
        import torch, torch_offload
        {CHANGES[change]}
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


@pytest.mark.parametrize("change", ["name", "parameters"])
def test_another_inductor_is_no_concern_of_others(change):
    told = passes(
        f"""
        import torch, torch_offload
        from torch._inductor.fx_passes import post_grad
        original = post_grad.get_all_devices
        {CHANGES[change]}
        x = torch.ones(3)
        print(torch.equal(torch.compile(torch.neg)(x), -x), post_grad.get_all_devices is original)
        """
    )
    assert told.split() == ["True", "True"]


def test_other_partitioners_are_refused():
    told = passes(
        """
        import torch, torch_offload
        from torch._functorch import partitioners
        del partitioners.has_recomputable_ops
        weight = torch.ones(2, 2, device="offload", requires_grad=True)
        try:
            torch.compile(lambda x: x @ weight, backend="aot_eager")(torch.ones(2, 2))
        except Exception as error:
            print(error)
        """
    )
    assert "PyTorch's partitioners have changed" in told
