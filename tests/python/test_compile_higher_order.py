"""torch.compile over operations that take functions: branches, loops, regions and score functions that use offload weights."""

import copy

import pytest
import torch
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, GPU, OFFLOAD, assert_same, at, data, grads
from torch import nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import torch_offload


class Weights(nn.Module):
    """Two layers, a matrix, a stack of matrices and a scalar."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.matrix, self.stack = nn.Parameter(at("cpu", 8, 8)), nn.Parameter(at("cpu", 3, 8, 8, seed=1))
        self.gate = nn.Parameter(torch.ones(()))


class Branches(Weights):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.first(x).sin(), lambda x: self.second(x).cos(), (x,))


class BranchesByAWeight(Weights):
    def forward(self, x):
        return torch.cond(self.gate > 0, lambda x: self.first(x).sin(), lambda x: self.second(x).cos(), (x,))


class BranchesOfWeights(Weights):
    """Nothing in them is where activations are, and so is nothing that comes out."""

    def forward(self, x):
        return x @ torch.cond(x.sum() > 0, lambda: self.matrix.sin(), lambda: self.first.weight * 2, ())


class AWeightOrAnActivation(Weights):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.matrix[:4].sin(), lambda x: x.cos(), (x,))


class BranchesInBranches(Weights):
    def forward(self, x):
        def inner(x):
            return torch.cond(x.max() > 1, self.first, lambda x: self.second(x).relu(), (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: self.second(x).cos(), (x,))


class CheckpointedBranches(Branches):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False) * 2


class LowerBranches(Branches):
    def forward(self, x):
        with torch.autocast(COMPUTE.type, dtype=torch.bfloat16):
            return super().forward(x).float()


class Loop(Weights):
    def forward(self, x):
        count = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda k, x: k < 3, lambda k, x: (k + 1, self.first(x).tanh()), (count, x))[1]


class LoopOverAWeight(Weights):
    """It begins with a weight, which keeps its value."""

    def forward(self, x):
        count = torch.zeros((), dtype=torch.int64, device=x.device)
        start = (count, x, self.matrix)
        return while_loop(lambda k, x, w: k < 3, lambda k, x, w: (k + 1, (x @ w).tanh(), w * 0.5), start)[1]


class Mapped(Weights):
    def forward(self, x):
        return map(lambda row: self.first(row).sin(), x)


class MappedWeights(Weights):
    def forward(self, x):
        return map(lambda weight, x: x @ weight, self.stack, x)


class Scanned(Weights):
    def forward(self, x):
        def step(carried, row):
            carried = (carried + self.first(row)).tanh()
            return carried, carried * 2

        return scan(step, x[0] * 0, x)[1]


class ScannedWeights(Weights):
    """A layer for each step, from a stack of them."""

    def forward(self, x):
        def step(carried, weight):
            carried = (carried @ weight).tanh()
            return carried, carried * 2

        return scan(step, x * 1, self.stack)[0]


class ScannedWithBranches(Weights):
    """What is made in the loop is made where the rows are, and so is what a branch in it makes."""

    def forward(self, x):
        def step(carried, row):
            def more(row):
                return self.first(row) + torch.full((8,), 0.5, device=x.device)

            added = torch.cond(carried.sum() > 0, more, lambda row: self.second(row).cos(), (row,))
            carried = (carried + added + torch.ones(8, device=row.device)).tanh()
            return carried, carried * 2

        return scan(step, torch.zeros(8, device=x.device), x)[1]


class Accumulated(Weights):
    def forward(self, x):
        return associative_scan(lambda a, b: a * b + self.gate, x, 0, combine_mode="generic")


@torch.compiler.nested_compile_region
def region(x, weight, bias):
    return nn.functional.linear(x, weight, bias).sin()


class Regions(Weights):
    """Traced once, called for each layer."""

    def forward(self, x):
        for layer in (self.first, self.second):
            x = region(x, layer.weight, layer.bias)
        return x


TRAINED = [
    *[Branches, BranchesByAWeight, BranchesOfWeights, AWeightOrAnActivation, BranchesInBranches, LowerBranches],
    *[Loop, Mapped, MappedWeights, Accumulated, Regions],
]
# Of these PyTorch doesn't compile the training, on any device, in one version or in all.
RUN = [*TRAINED, CheckpointedBranches, LoopOverAWeight, Scanned, ScannedWeights]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", RUN, ids=lambda kind: kind.__name__)
def test_inference(kind, backend):
    """Both ways through the branches, and again with other weights."""
    torch.manual_seed(0)
    plain = kind().to(COMPUTE)
    model, x = copy.deepcopy(plain).to(OFFLOAD), data(4, 8)
    step, expected = compiled(model, backend), compiled(plain, backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for given in (x, -x):
                result = step(given)
                assert result.device.type == COMPUTE.type
                # Of an accumulation inductor's kernels on a GPU differ in the last bit, as what they are fused with does.
                if not (GPU and backend == "inductor" and kind is Accumulated):
                    assert_same(result, expected(given))
                torch.testing.assert_close(result, plain(given))
        for changed in (plain, model):
            changed.load_state_dict({name: 0.5 * value.cpu() for name, value in changed.state_dict().items()})
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.__name__)
def test_training(kind, backend):
    torch.manual_seed(0)
    plain = kind().to(COMPUTE)
    model = copy.deepcopy(plain).to(OFFLOAD)
    seen = []
    for each in (plain, model):
        torch.compiler.reset()
        step, found = compiled(each, backend), []
        for sign in (1, -1):
            each.zero_grad()
            x = (sign * data(4, 8)).requires_grad_()
            y = step(x)
            y.square().sum().backward()
            given = {name: g.cpu() for name, g in grads(each).items() if g is not None}
            assert any(gradient.any() for gradient in given.values()) or kind is AWeightOrAnActivation
            found.append((y.detach(), x.grad, given))
        seen.append(found)
    assert_same(seen[1], seen[0])


LOOPS = [Mapped, MappedWeights, Scanned, ScannedWeights, ScannedWithBranches]


def with_each_input(kind, backend, training):
    """What the model gives beside activations on the device, and of offload tensors alone: values, and gradients."""
    torch.manual_seed(0)
    plain = kind().to(COMPUTE)
    model = copy.deepcopy(plain).to(OFFLOAD)
    seen = []
    for each, device in ((plain, COMPUTE), (model, OFFLOAD)):
        torch.compiler.reset()
        step = each if backend is None else compiled(each, backend)
        x = data(4, 8).to(device).requires_grad_(training)
        y = step(x)
        assert y.device.type == device.type
        if training:
            y.square().sum().backward()
            assert x.grad.device.type == device.type
            assert any(g is not None and g.any() for g in grads(each).values())
        seen.append((y, x.grad, {name: g for name, g in grads(each).items() if g is not None}))
    return seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
def test_loops_over_offload_tensors_alone(kind, backend, mode):
    with mode():
        expected, seen = with_each_input(kind, backend, False)
    assert_same(seen, expected)


@pytest.mark.parametrize(
    ("kind", "backend"),
    # Of the training of scans PyTorch compiles little, on any device.
    [(kind, None) for kind in LOOPS] + [(kind, backend) for kind in (Mapped, MappedWeights) for backend in BACKENDS],
)
def test_loops_over_offload_tensors_alone_are_trained(kind, backend):
    expected, seen = with_each_input(kind, backend, True)
    assert_same(seen, expected)


def test_loops_over_offload_tensors_run_on_the_host_where_that_is_asked_for():
    model = Mapped().to(OFFLOAD)
    x = data(4, 8).to(OFFLOAD)
    with torch.no_grad(), torch_offload.on_host():
        assert_same(model(x), copy.deepcopy(model).cpu()(x.cpu()))


class Attention(nn.Module):
    """A table of biases by distance, and segments that don't see each other: both are what functions capture."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.biases = nn.Parameter(at("cpu", 2, 16))
        self.register_buffer("segments", torch.arange(16) // 4)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 16)).transpose(1, 2).contiguous() for f in (self.query, self.key, self.value))
        mask = create_block_mask(lambda b, h, i, j: self.segments[i] == self.segments[j], None, None, 16, 16, x.device)
        return flex_attention(q, k, v, lambda score, b, h, i, j: score + self.biases[h, (i - j).abs()], mask)


class LowerAttention(Attention):
    def forward(self, x):
        with torch.autocast(COMPUTE.type, dtype=torch.bfloat16):
            return super().forward(x)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [Attention, LowerAttention], ids=lambda kind: kind.__name__)
def test_attention_with_a_score_function(kind, backend):
    """Without autograd, as PyTorch has no backward of it on the CPU."""
    torch.manual_seed(0)
    plain = kind().to(COMPUTE)
    model = copy.deepcopy(plain).to(OFFLOAD)
    step, expected = compiled(model, backend), compiled(plain, backend)
    for seed in range(2):
        x = data(1, 16, 32, seed=seed)
        assert_same(step(x), expected(x))
        for changed in (plain, model):
            changed.biases.copy_(changed.biases.cpu() * 2)


@torch.no_grad()
@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("kind", [Attention, LowerAttention], ids=lambda kind: kind.__name__)
def test_attention_over_offload_tensors_alone(kind, backend):
    torch.manual_seed(0)
    plain = kind().to(COMPUTE)
    model, x = copy.deepcopy(plain).to(OFFLOAD), data(1, 16, 32)
    step, expected = (each if backend is None else compiled(each, backend) for each in (model, plain))
    result = step(x.to(OFFLOAD))
    assert result.device.type == "offload"
    assert_same(result, expected(x))


@torch.no_grad()
def test_attention_with_some_operands_on_offload():
    """They follow the others, whatever their places."""
    query, key, value = (at("cpu", 1, 2, 16, 16, seed=seed).to(COMPUTE) for seed in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, COMPUTE)
    expected, aux = flex_attention(query, key, value, block_mask=mask, return_aux=AuxRequest(lse=True))
    given = {"key": key.to(OFFLOAD), "value": value, "block_mask": mask.to(OFFLOAD), "return_aux": AuxRequest(lse=True)}
    result, found = flex_attention(query, **given)
    assert result.device.type == found.lse.device.type == COMPUTE.type
    assert_same((result, found.lse), (expected, aux.lse))
    given |= {"value": value.to(OFFLOAD)}
    result, found = flex_attention(query.to(OFFLOAD), **given)
    assert result.device.type == found.lse.device.type == "offload"
    assert_same((result, found.lse), (expected, aux.lse))
    with torch_offload.on_host():
        on_host = flex_attention(query.to(OFFLOAD), **given)[0]
    assert_same(on_host, flex_attention(query.cpu(), key.cpu(), value.cpu(), block_mask=mask.to("cpu")))


@pytest.mark.skipif(not GPU, reason="PyTorch has no backward of it on the CPU")
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_over_offload_tensors_is_trained(backend):
    expected, seen = [], []
    for device, found in ((COMPUTE, expected), (OFFLOAD, seen)):
        torch.compiler.reset()
        given = [at("cpu", 1, 2, 128, 16, seed=seed).to(device).requires_grad_() for seed in range(3)]
        y = compiled(flex_attention, backend)(*given)
        y.square().sum().backward()
        assert all(value.grad.device.type == device.type for value in given)
        found += [y.detach(), *(value.grad for value in given)]
    assert_same(seen, expected)


@torch.compiler.nested_compile_region
def counted(x, count):
    count.add_(1)
    return x * count


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_that_writes_is_refused(backend):
    """It would write to what was fetched."""
    count = torch.zeros(8, device=OFFLOAD)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="invoke_subgraph calls writes to an offload tensor, of which it has a"),
    ):
        compiled(lambda x: counted(x, count) + counted(x, count), backend)(data(4, 8))
    assert_same(count, torch.zeros(8))
