"""Elementwise programs by vector kernels: PyTorch's bits, or PyTorch's own operation."""

import platform

import pytest
import torch
from helpers import OFFLOAD, passes

from torch_offload import _elementwise

CODES = {
    "add": lambda t: t[0].add_(t[1]),
    "add scaled": lambda t: t[0].add_(t[1], alpha=-0.1),
    "add number": lambda t: t[0].add_(1e-4),
    "add scaled number": lambda t: t[0].add_(0.3, alpha=0.7),
    "sub": lambda t: t[0].sub_(t[1]),
    "sub scaled": lambda t: t[0].sub_(t[1], alpha=0.3),
    "sub number": lambda t: t[0].sub_(0.3),
    "mul": lambda t: t[0].mul_(t[1]),
    "mul number": lambda t: t[0].mul_(0.999),
    "mul to another": lambda t: torch.mul(t[1], t[2], out=t[0]),
    "div": lambda t: t[0].div_(t[1]),
    "div number": lambda t: t[0].div_(0.3),
    "div to an integer": lambda t: t[0].div_(0.3, rounding_mode="floor"),
    "lerp near": lambda t: t[0].lerp_(t[1], 0.1),
    "lerp far": lambda t: t[0].lerp_(t[1], 0.9),
    "lerp beyond": lambda t: t[0].lerp_(t[1], -1.5),
    "addcmul": lambda t: t[0].addcmul_(t[1], t[2], value=0.001),
    "addcmul with itself": lambda t: t[0].addcmul_(t[1], t[1], value=0.001),
    "addcdiv": lambda t: t[0].addcdiv_(t[1], t[2], value=-0.01),
    "sqrt": lambda t: t[0].sqrt_(),
    "neg": lambda t: t[0].neg_(),
    "maximum": lambda t: torch.maximum(t[0], t[1], out=t[0]),
    "others between": lambda t: t[0].mul_(t[1]).sign_().mul_(0.3).mul_(t[1]).maximum(t[2]),
    "temporaries": lambda t: t[0].addcdiv_(t[1], (t[2] * 3 + 1).abs().sqrt().add_(1e-3), value=0.7),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
HAS_VECTORS = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
vectors = pytest.mark.skipif(not HAS_VECTORS, reason="no kernels for this processor")


def values(dtype, count, seed):
    """Many magnitudes of both signs, and a sixteenth of it special: infinities, NaN, subnormal numbers, zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, generator=generator, dtype=torch.float64)
    made *= torch.pow(2.0, torch.randint(-12, 12, (count,), generator=generator))
    special = torch.tensor(
        [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-40, -1e-310, 3e38], dtype=torch.float64
    )
    places = torch.randint(0, 16 * len(special), (count,), generator=generator)
    return torch.where(places < len(special), special[places % len(special)], made).to(dtype)


def same_bits(ours, plain):
    """Any NaN is as good as another."""
    numbers = ~(ours.isnan() & plain.isnan())
    ours, plain = ours[numbers], plain[numbers]
    return torch.equal(ours, plain) and torch.equal(ours.signbit(), plain.signbit())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODES)
def test_the_bits_of_the_operations(name, dtype):
    # As long as PyTorch computes it on one thread: at the ends of what each is given, some of its operations round otherwise.
    for count in (1, 31, 511, 16_384 + 255, 32_000):
        plain = [values(dtype, count, seed) for seed in range(3)]
        operands = [value.to(OFFLOAD) for value in plain]
        _elementwise.record(CODES[name], operands).run(operands)
        CODES[name](plain)
        for ours, expected in zip(operands, plain, strict=True):
            assert same_bits(ours.cpu(), expected)


@pytest.mark.parametrize("name", ["mul number", "add number", "lerp near", "addcmul", "addcdiv", "div", "temporaries"])
def test_all_bits_of_a_small_type(name):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    plain = [every.clone(), every.roll(12_345).clone(), every.flip(0).clone()]
    operands = [value.to(OFFLOAD) for value in plain]
    _elementwise.record(CODES[name], operands).run(operands)
    CODES[name](plain)
    assert same_bits(operands[0].cpu(), plain[0])


@vectors
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_optimizers_operations_are_vector_kernels(dtype):
    def adamw(t):
        parameter, gradient, average, square = t
        parameter.mul_(0.999)
        average.lerp_(gradient, 0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        parameter.addcdiv_(average, square.sqrt().div(0.3).add_(1e-8), value=-0.001)

    program = _elementwise.record(adamw, [torch.ones(1, dtype=dtype)] * 4)
    # The square root of float and double comes from a library, which need not round to the nearest.
    assert program.vector_steps == (8 if dtype is torch.bfloat16 else 7)


@pytest.mark.parametrize("name", ["add scaled", "sub scaled", "maximum", "addcmul", "mul number"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_differs_at_the_ends_stays_pytorchs(name, dtype):
    """PyTorch computes the last elements by other code: in bfloat16 it rounds a product there that it rounds nowhere else, and
    the larger of two zeros has another sign."""
    whole = [values(dtype, 7 * 4000, seed) for seed in range(3)]
    whole[0][:7000], whole[1][:7000] = 0.0, -0.0
    pieces = [value.clone() for value in whole]
    CODES[name](whole)
    for k in range(4000):
        CODES[name]([value[7 * k : 7 * k + 7] for value in pieces])
    alike = same_bits(whole[0], pieces[0])
    assert alike or _elementwise.record(CODES[name], [torch.ones(1, dtype=dtype)] * 3).vector_steps == 0


def test_zeros_of_both_signs():
    zero, minus = torch.zeros(5), -torch.zeros(5)
    for first, second in ((zero, minus), (minus, zero)):
        for name in ("add", "sub", "mul", "maximum", "lerp near", "addcmul", "neg"):
            plain = [first.clone(), second.clone(), second.clone()]
            operands = [value.to(OFFLOAD) for value in plain]
            _elementwise.record(CODES[name], operands).run(operands)
            CODES[name](plain)
            assert same_bits(operands[0].cpu(), plain[0])


@pytest.mark.parametrize("dtypes", [(torch.float16,) * 3, (torch.float32, torch.float32, torch.bfloat16)])
def test_other_types_are_pytorchs(dtypes):
    plain = [values(dtype, 1000, seed) for seed, dtype in enumerate(dtypes)]
    operands = [value.to(OFFLOAD) for value in plain]
    program = _elementwise.record(CODES["mul"], operands)
    assert program.vector_steps == 0
    program.run(operands)
    CODES["mul"](plain)
    assert same_bits(operands[0].cpu(), plain[0])


@vectors
def test_operands_of_another_type_than_it_was_prepared_for():
    program = _elementwise.record(CODES["mul"], [torch.ones(1)] * 3)
    assert program.vector_steps == 1
    operands = [torch.full((1000,), 3.0, dtype=torch.bfloat16, device=OFFLOAD) for _ in range(3)]
    program.run(operands)
    assert (operands[0].cpu() == 9).all()


def test_a_profile_shows_nothing_of_the_samples():
    """In a process of its own, where nothing has been looked at yet."""
    passes(
        """
        import torch, torch_offload
        parameter = torch.ones(1000, device="offload", requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter])
        with torch.profiler.profile() as profiled:
            optimizer.step()
        assert len(profiled.events()) < 500, len(profiled.events())
        """
    )


def test_a_program_is_prepared_once():
    program = _elementwise.record(CODES["mul"], [torch.ones(1)] * 3)
    with pytest.raises(RuntimeError, match="prepared once"):
        program.prepare([torch.float64] * 3)


def test_subnormal_numbers_as_the_thread_takes_them():
    """Whichever thread computes an element. What is flushed when the kernels are looked at has no say."""
    found = []
    for flush in (False, True):
        operand = torch.full((1_000_000,), 2e-38, device=OFFLOAD)
        if not torch.set_flush_denormal(flush):
            pytest.skip("this processor can't")
        try:
            _elementwise.record(lambda t: t[0].mul_(0.25), [operand]).run([operand])
        finally:
            torch.set_flush_denormal(False)
        found.append(operand.cpu().count_nonzero().item())
    assert found == [1_000_000, 0]
