"""torch.compile in training with inductor: sizes, budgets and weights change between steps, and nothing is compiled again."""

import copy

import pytest
import torch
from compiling import fresh_compiler  # noqa: F401 - a fixture for all tests
from helpers import COMPUTE, OFFLOAD, assert_same, at, data, grads, layers
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_offload


class Compilations:
    """Inductor as a backend, which counts the graphs that it is to compile, forwards and backwards: none comes from a cache."""

    def __init__(self):
        self.forward = self.backward = 0

    def __call__(self, graph, inputs):
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=self._inner)

    def _inner(self, graph, inputs, **options):
        if options.get("is_backward"):
            self.backward += 1
        else:
            self.forward += 1
        return compile_fx_inner(graph, inputs, **options)

    def counts(self):
        return self.forward, self.backward


class Attention(nn.Module):
    """Sizes of the input are in views, in the norm's statistics and in the mean."""

    def __init__(self):
        super().__init__()
        self.packed, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.packed(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(x.shape)) / x.shape[1]


MODELS = {"linear": (layers, (8,)), "attention": (Attention, (6, 8))}


@pytest.mark.parametrize("name", MODELS)
def test_dynamic_batches(name):
    """Values, gradients of the weights and of the input; the graph with sizes is the resident model's."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()

    def run(device):
        torch.compiler.reset()
        trained, counted = copy.deepcopy(model).to(device), Compilations()
        step = torch.compile(trained, backend=counted, dynamic=True, fullgraph=True)
        seen = []
        for batch in (3, 5, 8, 3):
            trained.zero_grad()
            x = data(batch, *shape, seed=batch).requires_grad_()
            y = step(x)
            y.square().mean().backward()
            seen.append((y.detach(), x.grad, {name: gradient.cpu() for name, gradient in grads(trained).items()}))
        assert counted.counts() == (1, 1)
        return seen

    assert_same(run(OFFLOAD), run(COMPUTE))


def test_no_recompilation_in_training():
    """Neither graph knows the budget, what the cache holds, or the weights' values; each of these changes before a step."""
    torch.manual_seed(0)
    plain = layers().to(COMPUTE)
    model, counted, x = copy.deepcopy(plain).to(OFFLOAD), Compilations(), data(3, 8)
    steps = [torch.compile(plain, fullgraph=True), torch.compile(model, backend=counted, fullgraph=True)]

    @torch.no_grad()
    def write():
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.copy_(parameter.cpu() * 0.5)

    def load(assign):
        for each in (plain, model):
            each.load_state_dict({name: value * -2 for name, value in each.state_dict().items()}, assign=assign)

    changes = [
        lambda: None,
        lambda: torch_offload.set_budget(0),
        torch_offload.empty_cache,
        write,
        lambda: torch_offload.set_budget("auto"),
        lambda: load(assign=False),
        lambda: load(assign=True),
        lambda: None,
    ]
    outputs = []
    try:
        for change in changes:
            change()
            seen = []
            for step, each in zip(steps, (plain, model), strict=True):
                each.zero_grad()
                y = step(x)
                y.square().mean().backward()
                seen.append((y.detach(), {name: gradient.cpu() for name, gradient in grads(each).items()}))
            assert_same(seen[1], seen[0])
            outputs.append(seen[1][0])
    finally:
        torch_offload.set_budget("auto")
    assert counted.counts() == (1, 1)
    assert len({tuple(y.flatten().tolist()) for y in outputs}) == 4  # the weights' changes, and the first


def test_training_against_eager():
    """Inductor fuses and reorders, so its gradients are those of eager training within the tolerance for the dtype."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).to(COMPUTE)
    model = copy.deepcopy(plain).to(OFFLOAD)
    step = torch.compile(model, fullgraph=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for k in range(3):
        losses = []
        for function, optimizer in zip((plain, step), optimizers, strict=True):
            optimizer.zero_grad()
            loss = function(data(5, 8, seed=k)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(grads(model), grads(plain), check_device=False)
        for optimizer in optimizers:
            optimizer.step()


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_numbers_that_are_read():
    """Of integers, whose values the graph has symbols for."""
    x = data(3, 8)
    number, several = torch.tensor(3, device=OFFLOAD), torch.tensor([1, 2], device=OFFLOAD)
    assert_same(torch.compile(lambda x, n: x * n.item(), fullgraph=True)(x, number), x * 3)
    assert_same(torch.compile(lambda x, n: x + sum(n.tolist()), fullgraph=True)(x, several), x + 3)


INDEX = torch.tensor([1, 0])
WRITES = {
    "row": lambda b, x: b.add_(x[0]),
    "rows": lambda b, x: b.index_add_(0, INDEX.to(x.device), x),
    "index": lambda b, x: b.index_put_((INDEX.to(x.device),), x[0]),
    "slice": lambda b, x: b[1:].mul_(x[0]),
    "list": lambda b, x: torch._foreach_add_([b, b], [x[0], x[1]]),
    "expanded": lambda b, x: b.expand(3, *b.shape)[0].mul_(x[1]),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_beside_another_device_leaves_sizes_open(write):
    def step(b, x):
        WRITES[write](b, x)
        return b * 2

    def run(device):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        function = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
        results = []
        for count in (6, 9, 5):
            b, x = at(device, count, 8), data(2, 8)
            results += [function(b, x), b]
        assert counter.frame_count == 1
        return results

    for one, other in zip(run(OFFLOAD), run(COMPUTE), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu())
