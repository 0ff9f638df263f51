"""Random programs on offload tensors and on their plain twins: views, writes, copies, mixed operations, in any order.

What a cache can get wrong shows here: a copy that outlives a write, a write that is lost, memory that is used again too early.
A failing seed is a bug report; the program's lines are in the error.
"""

import random

import pytest
import torch
from helpers import COMPUTE, CPU, OFFLOAD, SIM, assert_same

import torch_offload

N = 6
HOMES = [torch.device("offload", index) for index in range(torch.offload.device_count())]


class Program:
    """Pairs of an offload tensor and a plain twin. All values are small multiples of 1/8: every sum is exact everywhere."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.lines: list[str] = []
        for _ in range(3):
            self.make()

    def fresh(self) -> torch.Tensor:
        return torch.tensor([[self.draw.randint(-8, 8) / 8 for _ in range(N)] for _ in range(N)])

    def add(self, there: torch.Tensor, plain: torch.Tensor) -> None:
        self.pairs.append((there, plain))
        if len(self.pairs) > 8:
            self.pairs.pop(self.draw.randrange(len(self.pairs)))

    def pick(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.draw.choice(self.pairs)

    # Each of these is one line of a program.

    def make(self) -> None:
        plain = self.fresh()
        self.add(plain.to(self.draw.choice(HOMES)), plain.to(COMPUTE))

    def compute(self) -> None:
        (a, p), (b, q) = self.pick(), self.pick()
        kind = self.draw.randrange(4)
        f = [
            lambda x, y: (x + y).clamp(-4, 4),
            lambda x, y: torch.maximum(x, y),
            lambda x, y: (x - y).sign(),
            lambda x, y: torch.where(x > y, x, y.t()),
        ][kind]
        self.add(f(a, b), f(p, q))

    def move(self) -> None:
        (a, p), (b, q) = self.pick(), self.pick()
        f = self.draw.choice(
            [
                lambda x, y: x.clone(),
                lambda x, y: torch.cat([x[:2], y[2:]]),
                lambda x, y: x.flip(0),
                lambda x, y: x.double().float(),
                lambda x, y: x.t().contiguous(),
                lambda x, y: x[[3, 1, 0, 5, 4, 2]],
            ]
        )
        self.add(f(a, b), f(p, q))

    def view(self) -> None:
        a, p = self.pick()
        f = self.draw.choice(
            [lambda t: t.t(), lambda t: t.view(N, N) if t.is_contiguous() else t.t(), lambda t: t.detach()]
        )
        self.add(f(a), f(p))

    def write(self) -> None:
        (a, p), (b, q) = self.pick(), self.pick()
        k = self.draw.randrange(N - 1)
        b, q = b.clone(), q.clone()
        f = self.draw.choice(
            [
                lambda x, y: x.copy_(y),
                lambda x, y: x[k].copy_(y[k]),
                lambda x, y: x[:, k].fill_(0.5),
                lambda x, y: x.neg_(),
                lambda x, y: x[k:].copy_(y[k:]),
                lambda x, y: x.t()[k].add_(y[k]).clamp_(-4, 4),
                lambda x, y: x.masked_fill_(y > 0, 0.25),
                lambda x, y: x.__setitem__(k, y[k]),
                lambda x, y: torch.minimum(x.clone(), y, out=x),
            ]
        )
        f(a, b)
        f(p, q)

    def write_from_plain(self) -> None:
        a, p = self.pick()
        plain = self.fresh()
        k = self.draw.randrange(N - 1)
        place = self.draw.choice([CPU, COMPUTE])
        a[k:].copy_(plain[k:].to(place), non_blocking=self.draw.random() < 0.5)
        p[k:].copy_(plain[k:])

    def add_plain(self) -> None:
        a, p = self.pick()
        x = self.fresh().to(COMPUTE)
        a.add_(x).clamp_(-4, 4)
        p.add_(x).clamp_(-4, 4)

    def mixed(self) -> None:
        a, p = self.pick()
        x = self.fresh().to(COMPUTE)
        y, z = x + a, x + p
        assert y.device == COMPUTE
        self.hold(y, z)
        assert_same(x @ a, x @ p)

    def fetch(self) -> None:
        """What the user fetched is the user's: it stays what it was, and writing to it changes nothing else."""
        a, p = self.pick()
        mine, twin = a.to(COMPUTE, non_blocking=self.draw.random() < 0.5), p.clone()
        if self.draw.random() < 0.4:
            mine.add_(1)
            twin.add_(1)
        self.hold(mine, twin)

    def to_cpu(self) -> None:
        a, p = self.pick()
        self.hold(a.cpu(), p.clone())

    def back(self) -> None:
        if self.held:
            y, z = self.draw.choice(self.held)
            if y.device == COMPUTE:
                self.add(y.to(self.draw.choice(HOMES)), z.clone())

    def to_another(self) -> None:
        a, p = self.pick()
        home = self.draw.choice(HOMES)
        moved = a.to(home, copy=True)
        assert moved.device == home
        self.add(moved, p.clone())

    def hold(self, mine: torch.Tensor, twin: torch.Tensor) -> None:
        self.held.append((mine, twin))
        if len(self.held) > 4:
            self.held.pop(self.draw.randrange(len(self.held)))

    def item(self) -> None:
        a, p = self.pick()
        k = self.draw.randrange(N)
        assert a[k, 2].item() == p[k, 2].item()
        assert a.sum().item() == p.sum().item()

    def host(self) -> None:
        a, p = self.pick()
        with torch_offload.on_host():
            a.mul_(-1)
            self.add(a + a.t(), p.mul_(-1) + p.t())
            self.pairs[-1][0].clamp_(-4, 4)
            self.pairs[-1][1].clamp_(-4, 4)

    def empty(self) -> None:
        torch_offload.empty_cache()

    def drop(self) -> None:
        if len(self.pairs) > 2:
            self.pairs.pop(self.draw.randrange(len(self.pairs)))

    def check(self) -> None:
        for k, (mine, twin) in enumerate(self.held):
            assert_same(mine, twin, f"held {k}")
        k = self.draw.randrange(len(self.pairs))
        there, plain = self.pairs[k]
        assert there.device.type == "offload"
        assert_same(there, plain, f"pair {k}")

    ALL = (
        *(make, compute, compute, move, move, view, view, write, write, write, write_from_plain, add_plain),
        *(mixed, mixed, fetch, fetch, to_cpu, back, to_another, item, host, empty, drop, check),
    )

    def run(self, count: int) -> None:
        try:
            for _ in range(count):
                line = self.draw.choice(self.ALL)
                self.lines.append(line.__name__)
                line(self)
            for k, (there, plain) in enumerate(self.pairs):
                assert_same(there, plain, f"pair {k}")
            self.check()
        except Exception as error:
            raise AssertionError(f"after {', '.join(self.lines)}") from error


@pytest.mark.memcheck
@pytest.mark.parametrize("seed", range(20 if SIM else 10))
def test_program(seed):
    Program(seed).run(80)


def test_what_is_fetched_is_the_users():
    weight = torch.arange(16.0).view(4, 4).to(OFFLOAD)
    x = torch.eye(4, device=COMPUTE)
    first = weight.to(COMPUTE)
    first.add_(100)
    assert_same(weight, torch.arange(16.0).view(4, 4))
    assert_same(x @ weight, torch.arange(16.0).view(4, 4))
    second = weight.to(COMPUTE)
    weight.zero_()
    assert_same(second, torch.arange(16.0).view(4, 4))
    assert_same(first, torch.arange(16.0).view(4, 4) + 100)
    third = (x @ weight).to(OFFLOAD)
    third += 1
    assert_same(weight, torch.zeros(4, 4))


def test_what_is_stashed_is_a_copy():
    x = torch.arange(16.0, device=COMPUTE)
    there = x.to(OFFLOAD)
    x.add_(1)
    assert_same(there, torch.arange(16.0))
    there.add_(5)
    assert_same(x, torch.arange(16.0) + 1)


def test_random_training():
    """Layers frozen, thawed, stepped, copied, cast and used in random order, as the plain device does."""
    results = []
    for device in (COMPUTE, OFFLOAD):
        draw = random.Random(5)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(N, N).to(device) for _ in range(4)]
        losses = []
        for step in range(25):
            h = torch.randn(3, N, generator=torch.Generator().manual_seed(step)).to(COMPUTE)
            for _ in range(draw.randint(1, 5)):
                h = draw.choice(layers)(h).tanh()
            loss = h.square().mean()
            if loss.requires_grad:
                loss.backward(retain_graph=draw.random() < 0.3)
            losses.append(loss.detach())
            layer = draw.choice(layers)
            action = draw.randrange(6)
            if action == 0:
                layer.requires_grad_(not layer.weight.requires_grad)
            elif action == 1:
                layer.load_state_dict(draw.choice(layers).state_dict())
            elif action == 2:
                layer.double().float()
            elif action == 3:
                layer.to(CPU).to(device)
            else:
                for parameter in (p for each in layers for p in each.parameters() if p.grad is not None):
                    with torch.no_grad():
                        parameter.sub_(parameter.grad, alpha=0.25)
                    parameter.grad = None
            del h, loss
        results.append((losses, [p for layer in layers for p in layer.parameters()]))
    assert_same(results[1], results[0])
