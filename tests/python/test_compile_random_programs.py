"""Random modules, compiled: weights that are trained and frozen, a buffer that they write to, in any order, for several steps.

What a graph can get wrong of a write shows here: what forward reads before and after it, and what its backward reads then.
A failing seed is a bug report; the module's lines are in the error.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import CACHED, COMPUTE, OFFLOAD, at
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_offload

WEIGHTS = ("trained", "frozen", "buffer")
ROWS = [3, 0, 3, 5]

# Of an activation, another one, and a weight.
READS = {
    "linear": lambda x, y, w: F.linear(x, w),
    "product": lambda x, y, w: (x @ w).tanh(),
    "elements": lambda x, y, w: (x * w[:4]).sin(),
    "rows": lambda x, y, w: x * F.embedding(torch.tensor(ROWS, device=x.device), w),
    "indexed": lambda x, y, w: y + w[2:6],
    "computed again": lambda x, y, w: checkpoint(F.linear, x, w, use_reentrant=False),
    "cast": lambda x, y, w: x + F.linear(y.double(), w.double()).float(),
    "moved": lambda x, y, w: F.linear(x.to(w.device), w).to(x.device) + y,
    "sum": lambda x, y, w: (x + y) * w.mean(),
    "view": lambda x, y, w: x.t().reshape(4, 8).cos() - y,
    "held": lambda x, y, w: x.detach() * y,
}
# Of the buffer, an activation, and a weight.
WRITES = {
    "scaled": lambda b, x, w: b.mul_(0.5),
    "through a view": lambda b, x, w: b.t()[1:].add_(0.25),
    "in part": lambda b, x, w: b[2:].mul_(-1),
    "from an activation": lambda b, x, w: b[:4].copy_(x.detach()),
    "from a weight": lambda b, x, w: b.lerp_(w.detach(), 0.25),
    "from itself": lambda b, x, w: b.copy_(b.flip(0)),
    "list": lambda b, x, w: torch._foreach_add_([b], 0.125),
    "row by row": lambda b, x, w: b.index_copy_(0, torch.tensor([1, 6], device=b.device), b[:2].sin()),
}


class Random(nn.Module):
    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.trained = nn.Parameter(at("cpu", 8, 8, seed=1) / 4)
        self.frozen = nn.Parameter(at("cpu", 8, 8, seed=2) / 4, requires_grad=False)
        self.register_buffer("buffer", at("cpu", 8, 8, seed=3) / 4)
        self.lines = []
        for k in range(draw.randint(3, 8)):
            kind = draw.choice([*READS, *READS, *WRITES])
            known = [draw.randint(0, k) for _ in range(2)]
            self.lines.append((kind, *known, draw.choice(WEIGHTS)))
        self.lines.append(("linear", 0, 0, "buffer"))
        self.last_write = max((k for k, line in enumerate(self.lines) if line[0] in WRITES), default=-1)

    def forward(self, x):
        values = [x]
        for k, (kind, i, j, name) in enumerate(self.lines):
            w = getattr(self, name)
            if name == "buffer" and k < self.last_write:
                w = w.clone()  # or autograd says that it was modified
            i, j = i % len(values), j % len(values)
            if kind in WRITES:
                with torch.no_grad():
                    WRITES[kind](self.buffer, values[i], w)
            else:
                values.append(READS[kind](values[i], values[j], w))
        return values[-1], torch.stack(values[1:]).sum(0)


def check(seed, backend, steps=3):
    draw = random.Random(seed + 1)
    torch.manual_seed(seed)
    feed = draw.choice([OFFLOAD, COMPUTE])
    model, plain = Random(seed).to(OFFLOAD), Random(seed).to(COMPUTE)
    function = compiled(model, backend)
    try:
        for step in range(steps):
            if CACHED:
                torch_offload.set_budget(draw.choice([0, 512, 4096, "auto"]))
            results = []
            for net, call, device in ((plain, plain, COMPUTE), (model, function, feed)):
                x = at(device, 4, 8, seed=step).requires_grad_()
                y, total = call(x)
                (y.square().sum() + total.sum()).backward()
                results.append([y, total, x.grad, net.trained.grad, net.buffer])
            for expected, actual in zip(*results, strict=True):
                if expected is not None:
                    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)
    except Exception as error:
        raise AssertionError(f"after {model.lines}, fed from {feed}") from error
    finally:
        if CACHED:
            torch_offload.set_budget("auto")


@pytest.mark.parametrize("seed", range(40))
def test_random_modules(seed):
    check(seed, "aot_eager")


@pytest.mark.parametrize("seed", range(100, 103))
def test_random_modules_in_generated_code(seed):
    check(seed, BACKENDS[1])
