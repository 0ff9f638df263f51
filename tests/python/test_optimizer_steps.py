"""Optimizer steps piece by piece: the loop's bits, without its temporaries."""

import copy
import importlib

import pytest
import torch
from helpers import CPU, OFFLOAD, passes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_offload
from torch_offload import _C, _elementwise, _optimizer_steps

# Adamax, ASGD and Rprop do more than elementwise operations, or keep their counts on the parameter's device.
BY_PIECES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),  # which float16 has
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
}
AS_BEFORE = {
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}
LARGE = 1 << 14  # elements of a piece


def parameters(dtype=torch.float32):
    """Sizes that no piece divides, small ones, an empty one, and one that lies in another order."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(129, 131), (7,), (0,), (3 * LARGE + 1,), (5, LARGE // 4 + 3), (LARGE,)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    tensors.append(torch.randn(64, 32, 3, 3, generator=generator).to(dtype).to(memory_format=torch.channels_last))
    return tensors


def trained(make, device, steps=4, dtype=torch.float32, without=()):
    leaves = [nn.Parameter(tensor.to(device)) for tensor in parameters(dtype)]
    optimizer = make(leaves)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for number, leaf in enumerate(leaves):
            gradient = torch.randn(leaf.shape, generator=generator).to(dtype)
            late = number in without and step < 2
            leaf.grad = None if late else torch.empty_like(leaf).copy_(gradient.to(device))
        optimizer.step()
    return leaves, [optimizer.state[leaf] for leaf in leaves]


def assert_the_same(ours, plain):
    assert all(torch.equal(a.detach().cpu(), b.detach()) for a, b in zip(ours[0], plain[0], strict=True))
    for ours_one, plain_one in zip(ours[1], plain[1], strict=True):
        assert ours_one.keys() == plain_one.keys()
        for name, value in plain_one.items():
            if torch.is_tensor(value):
                assert torch.equal(ours_one[name].cpu(), value), name
            else:
                assert ours_one[name] == value, name


@pytest.fixture
def runs(monkeypatch):
    """How many parameters were stepped piece by piece, and in pieces that are small."""
    counts = []
    real = _elementwise.record

    class Counted:
        def __init__(self, program):
            self.program = program

        def run(self, operands):
            counts.append(len(operands))
            self.program.run(operands, 1000)

    monkeypatch.setattr(_optimizer_steps, "record", lambda code, operands: Counted(real(code, operands)))
    return counts


@pytest.mark.parametrize("name", BY_PIECES)
def test_the_bits_of_the_loop(name, runs):
    make = BY_PIECES[name]
    assert_the_same(trained(make, OFFLOAD), trained(make, CPU))
    # What makes its state in the first step does so in PyTorch's loop.
    assert len(runs) == (3 if name == "SGD momentum" else 4) * 6


@pytest.mark.parametrize("name", AS_BEFORE)
def test_what_does_not_fit_is_left_to_the_loop(name):
    make = AS_BEFORE[name]
    assert_the_same(trained(make, OFFLOAD), trained(make, CPU))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, runs):
    make = BY_PIECES["AdamW"]
    assert_the_same(trained(make, OFFLOAD, dtype=dtype), trained(make, CPU, dtype=dtype))
    assert runs


def test_parameters_at_different_steps(runs):
    """Some get their first gradient later, so their counts differ from the others'."""
    make = BY_PIECES["Adam amsgrad"]
    assert_the_same(trained(make, OFFLOAD, without=(0, 4)), trained(make, CPU, without=(0, 4)))
    assert len(runs) == 4 * 6 - 4


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
    ],
)
def test_other_ways(make, runs):
    assert_the_same(trained(make, OFFLOAD), trained(make, CPU))
    assert not runs


@pytest.mark.parametrize("algorithm", ["_single_tensor_adam", "_fused_adam"])
def test_what_backward_makes_first_is_stepped_first(algorithm, monkeypatch):
    """One parameter at a time, the last one first, so that nothing waits for another's gradient."""
    _optimizer_steps.install()
    module = importlib.import_module("torch.optim.adam")
    real, record = getattr(module, algorithm).__wrapped__, _elementwise.record
    shapes = []

    def noted(parameters, *others, **settings):
        if not parameters[0].is_meta:  # which is written down, not stepped
            shapes.append([tuple(parameter.shape) for parameter in parameters])
        return real(parameters, *others, **settings)

    class Noted:
        def __init__(self, program):
            self.program = program

        def run(self, operands):
            shapes.append([tuple(operands[0].shape)])
            self.program.run(operands)

    fused = algorithm == "_fused_adam"
    wrap = _optimizer_steps._one_by_one if fused else _optimizer_steps._piece_by_piece
    monkeypatch.setattr(module, algorithm, wrap(noted))
    monkeypatch.setattr(_optimizer_steps, "record", lambda code, operands: Noted(record(code, operands)))
    leaves, _ = trained(lambda p: torch.optim.AdamW(p, fused=fused, foreach=False), OFFLOAD, steps=1)
    assert shapes == [[tuple(leaf.shape)] for leaf in reversed(leaves)]
    shapes.clear()
    trained(lambda p: torch.optim.AdamW(p, fused=fused, foreach=False), CPU, steps=1)
    assert len(shapes) == 1, "all at once, as PyTorch does"


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "RMSprop"])
@pytest.mark.parametrize("shared", ["parameters", "a gradient"])
def test_what_shares_memory_is_stepped_in_the_loops_order(name, shared):
    def run(device):
        leaves = [nn.Parameter(torch.linspace(-1, 1, 300).mul(k + 1).to(device)) for k in range(3)]
        if shared == "parameters":
            leaves[2].data = leaves[0].data
        optimizer = BY_PIECES[name](leaves)
        for step in range(4):
            for k, leaf in enumerate(leaves):
                leaf.grad = torch.linspace(1, -1, 300).mul(k + step).to(device)
            if shared != "parameters":
                leaves[1].grad = leaves[2].detach()
            optimizer.step()
        return leaves, [optimizer.state[leaf] for leaf in leaves]

    assert_the_same(run(OFFLOAD), run(CPU))


def test_pieces_of_the_usual_size():
    tensor = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    results = []
    for device in (OFFLOAD, CPU):
        leaf = nn.Parameter(tensor.clone().to(device))
        optimizer = torch.optim.AdamW([leaf])
        for _ in range(3):
            leaf.grad = (tensor * 3).to(device)
            optimizer.step()
        results.append(leaf.detach().cpu())
    assert torch.equal(results[0], results[1])


def test_nothing_as_large_as_a_parameter_is_made():
    leaf = nn.Parameter(torch.ones(4 << 20, device=OFFLOAD))
    optimizer = torch.optim.AdamW([leaf])
    leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    torch.offload.reset_peak_memory_stats()
    before = torch_offload.memory_stats()["host.allocated_bytes.current"]
    optimizer.step()
    assert torch_offload.memory_stats()["host.allocated_bytes.peak"] - before < 1 << 20


def test_writes_are_seen():
    """By autograd, which refuses what was saved before, and by the cache."""
    leaf = nn.Parameter(torch.ones(LARGE, device=OFFLOAD))
    optimizer = torch.optim.SGD([leaf], lr=0.5)
    x = torch.ones(LARGE, requires_grad=True)
    loss = (x * leaf).sum()
    leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert ((x * leaf).detach().cpu() == 0.5).all()


def test_what_watches_operations_sees_each_of_them():
    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    leaf = nn.Parameter(torch.ones(LARGE, device=OFFLOAD))
    optimizer = torch.optim.SGD([leaf], lr=0.5)
    leaf.grad = torch.ones_like(leaf)
    with Watch() as watch:
        optimizer.step()
    assert "aten::add_" in watch.seen
    assert (leaf.detach().cpu() == 0.5).all()


def test_the_plain_devices_loops_are_pytorchs():
    leaf = nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.AdamW([leaf])
    leaf.grad = torch.ones(LARGE)
    twin = copy.deepcopy(leaf)
    other = torch.optim.AdamW([twin], foreach=False)
    twin.grad = torch.ones(LARGE)
    optimizer.step()
    other.step()
    assert torch.equal(leaf.detach(), twin.detach())


def test_what_can_not_be_written_down():
    for code in (
        lambda t: t[0].cumsum(0),
        lambda t: t[0].mul_(torch.ones(1)),
        lambda t: t[0].clamp_(t[1].sum(), 1),
        lambda t: torch.frexp(t[0]),
        lambda t: t[0].bernoulli_(0.5),
        lambda t: torch.nn.functional.dropout(t[0]),
    ):
        with pytest.raises(_elementwise.NotElementwise):
            _elementwise.record(code, [torch.ones(3), torch.ones(3)])


def test_a_program_says_what_does_not_fit():
    program = _elementwise.record(lambda t: t[0].add_(t[1], alpha=2), [torch.ones(3), torch.ones(3)])
    a, b = torch.ones(3, 4, device=OFFLOAD), torch.ones(3, 4, device=OFFLOAD)
    for operands in (
        [a],
        [a, b.t()],
        [a, torch.ones(3, 4)],
        [a, torch.ones(4, 3, device=OFFLOAD)],
        [a[:, :2], b[:, :2]],
    ):
        assert len(operands) == 1 or not _C.ElementwiseProgram.fits(operands)
        with pytest.raises(RuntimeError, match="takes 2 dense offload tensors of one size and strides"):
            program.run(operands)
    program.run([a, b])
    assert (a.cpu() == 3).all()


def test_torchscript_compiles_the_algorithms_themselves():
    """PyTorch's functional optimizers are scripted when they are imported, which may be after a step on offload."""
    passes("""
        import warnings
        import torch, torch_offload
        warnings.simplefilter("ignore")
        for name in ("AdamW", "SGD", "Adagrad", "Adadelta", "RMSprop", "Adamax", "Rprop"):
            parameter = torch.nn.Parameter(torch.zeros(2, device="offload"))
            parameter.grad = torch.ones_like(parameter)
            getattr(torch.optim, name)([parameter]).step()
        import torch.distributed.optim
    """)
