"""Seeds, states and generators: an offload tensor draws what a CPU tensor draws, and on a GPU what a CUDA tensor draws."""

import copy
import pickle

import pytest
import torch
from helpers import CPU, GPU, OFFLOAD, assert_same, passes

SEEDS = {
    "torch": torch.manual_seed,
    "one": torch.offload.manual_seed,
    "all": torch.offload.manual_seed_all,
}


def draws():
    """Values of both generators, where there are two."""
    numbers = [torch.randn(5, device=OFFLOAD), torch.rand(3, 3, device=OFFLOAD).bernoulli(), torch.randn(5)]
    return numbers + ([torch.randn(5, device="cuda"), made_on_the_gpu()] if GPU else [])


def made_on_the_gpu():
    probabilities = torch.ones(100, device=OFFLOAD) / 100 * 1
    return torch.multinomial(probabilities, 50)


@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.parametrize("seed", [0, 9, 2**63 + 1, -3])
def test_a_seed_gives_the_same_numbers(name, seed):
    torch.manual_seed(seed)
    plain = torch.randn(5, device=CPU)
    numbers = []
    for seed_with in (torch.manual_seed, SEEDS[name]):
        seed_with(seed)
        assert torch.offload.initial_seed() == torch.initial_seed() == seed % 2**64
        numbers.append(draws())
    assert_same(numbers[0][0], plain)
    assert_same(numbers[1], numbers[0])


@pytest.mark.parametrize("name", ["seed", "seed_all"])
def test_a_seed_of_the_systems(name):
    first, second = getattr(torch.offload, name)(), getattr(torch.offload, name)()
    assert first != second
    assert torch.offload.initial_seed() == second
    after = draws()
    torch.manual_seed(second)
    assert_same(draws(), after)


@pytest.mark.parametrize("seed", [2**64, "nine", None])
def test_what_is_no_seed(seed):
    state = torch.offload.get_rng_state()
    for seed_with in SEEDS.values():
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            seed_with(seed)
    assert_same(torch.offload.get_rng_state(), state)


def test_a_seed_does_not_touch_cuda():
    """A forked child may still be the first to use it."""
    passes(
        """
        import os, torch, torch_offload
        torch.offload.manual_seed(1)
        torch.offload.manual_seed_all(2)
        assert not torch.cuda.is_initialized()
        pid = os.fork()
        if pid == 0:
            torch.offload.manual_seed(3)
            os._exit(0 if torch.initial_seed() == 3 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )


@pytest.mark.gpu
@pytest.mark.parametrize("seed_with", ["manual_seed", "manual_seed_all"])
def test_a_seed_before_the_first_use_of_cuda(seed_with):
    """The CUDA device gets it when it is first used; in a forked child only the CPU's generator does, and has a state."""
    passes(
        f"""
        import os, torch, torch_offload
        torch.offload.{seed_with}(5)
        assert not torch.cuda.is_initialized()
        value = torch.randn(4, device="cuda")
        torch.cuda.manual_seed(5)
        assert torch.equal(torch.randn(4, device="cuda"), value)
        pid = os.fork()
        if pid == 0:
            torch.offload.{seed_with}(3)
            state = torch.offload.get_rng_state()
            torch.offload.set_rng_state(state)
            os._exit(0 if torch.equal(state, torch.get_rng_state()) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )


def test_random_state():
    state = torch.offload.get_rng_state()
    assert (state.device, state.dtype, state.dim()) == (CPU, torch.uint8, 1)
    one = draws()
    torch.offload.set_rng_state(state)
    assert_same(draws(), one)
    with torch.random.fork_rng(devices=[0], device_type="offload"):
        two = draws()
    assert_same(draws(), two)


def test_states_of_all_devices():
    states = torch.offload.get_rng_state_all()
    assert len(states) == torch.offload.device_count()
    one = draws()
    torch.offload.set_rng_state_all(states)
    assert_same(draws(), one)


def test_a_state_from_another_kind_of_machine():
    """Taken without a GPU, and restored beside one; and the other way round."""
    torch.manual_seed(4)
    expected = torch.rand(3)
    for more in (0, 16):
        torch.manual_seed(4)
        state = torch.cat([torch.get_rng_state(), torch.zeros(more, dtype=torch.uint8)])
        torch.manual_seed(5)
        torch.offload.set_rng_state(state)
        assert_same(torch.rand(3, device=OFFLOAD), expected)


WRONG = {
    "number": (7, TypeError, "a tensor; got int"),
    "none": (None, TypeError, "a tensor; got NoneType"),
    "dtype": (torch.zeros(5056), TypeError, r"of dtype torch\.uint8; got one of dtype torch\.float32 on cpu"),
    "device": (
        torch.zeros(5056, dtype=torch.uint8, device=OFFLOAD),
        TypeError,
        r"a CPU tensor.*got one of dtype torch\.uint8 on offload:0",
    ),
    "length": (torch.zeros(3, dtype=torch.uint8), ValueError, r"of shape \(\d+,\), or .*got the shape \(3,\)"),
    "longer": (torch.zeros(5061, dtype=torch.uint8), ValueError, r"got the shape \(5061,\)"),
    "dimensions": (torch.zeros(2, 2528, dtype=torch.uint8), ValueError, r"got the shape \(2, 2528\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_state(case):
    value, error, said = WRONG[case]
    before = torch.offload.get_rng_state()
    with pytest.raises(error, match=rf"^expected a state of get_rng_state\(\), .*{said}\.$"):
        torch.offload.set_rng_state(value)
    assert_same(torch.offload.get_rng_state(), before)


def test_default_generators():
    generators = torch.offload.default_generators
    assert [generator.device for generator in generators] == [
        torch.device("offload", index) for index in range(torch.offload.device_count())
    ]
    generators[0].manual_seed(3)
    assert torch.initial_seed() == 3
    assert_same(torch.rand(3, generator=generators[0], device=OFFLOAD), rand_of(3))


def rand_of(seed):
    return torch.rand(3, generator=torch.Generator().manual_seed(seed))


def test_generators():
    mine = torch.Generator(device="offload")
    assert mine.device.type == "offload"
    cpu = torch.Generator()
    for generator in (mine, cpu):
        generator.manual_seed(5)
    expected = torch.randn(6, generator=cpu)
    assert_same(torch.randn(6, generator=mine, device=OFFLOAD), expected)
    assert mine.initial_seed() == 5
    state = mine.get_state()
    a = torch.randn(3, generator=mine, device=OFFLOAD)
    mine.set_state(state)
    assert_same(torch.randn(3, generator=mine, device=OFFLOAD), a)
    # The CPU's own generator serves as well: the numbers are made on the host.
    cpu.manual_seed(5)
    assert_same(torch.randn(6, generator=cpu, device=OFFLOAD), expected)
    cpu.manual_seed(5)
    assert_same(torch.empty(6, device=OFFLOAD).normal_(generator=cpu), expected)
    assert_same(
        torch.multinomial(torch.ones(4, device=OFFLOAD), 2, generator=cpu).sort().values >= 0, torch.ones(2) > 0
    )


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda generator: pickle.loads(pickle.dumps(generator)),
    "clone_state": lambda generator: generator.clone_state(),
    "deepcopy in a list": lambda generator: copy.deepcopy([generator])[0],
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("device", [CPU, OFFLOAD], ids=str)
def test_copies_of_a_generator(device, name):
    """A copy draws the same numbers and goes its own way, as a CPU generator's does."""
    generator = torch.Generator(device).manual_seed(8)
    torch.rand(7, generator=generator, device=device)  # midway
    other = COPIES[name](generator)
    assert other is not generator
    assert (other.device, other.initial_seed()) == (generator.device, 8)
    assert_same(other.get_state(), generator.get_state())
    first = torch.randn(9, generator=other, device=device)
    assert_same(torch.randn(9, generator=generator, device=device), first)
    other.manual_seed(1)
    assert generator.initial_seed() == 8


def test_a_copy_of_the_default_generator():
    torch.manual_seed(2)
    other = copy.deepcopy(torch.offload.default_generators[0])
    expected = torch.rand(3)
    assert_same(torch.rand(3, generator=other, device=OFFLOAD), expected)
    torch.manual_seed(2)  # leaves the copy alone
    assert not torch.equal(torch.rand(3, generator=other, device=OFFLOAD).cpu(), expected)


@pytest.mark.parametrize("device", [CPU, OFFLOAD], ids=str)
def test_what_a_generator_of_the_host_has_not(device):
    generator = torch.Generator(device)
    with pytest.raises(RuntimeError, match="does not use offset"):
        generator.set_offset(4)
    for use in (generator.graphsafe_get_state, lambda: generator.graphsafe_set_state(torch.Generator(device))):
        with pytest.raises(NotImplementedError, match="graphsafe"):
            use()
    with pytest.raises((RuntimeError, TypeError), match=r"size|ByteTensor"):
        generator.set_state(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.gpu
def test_cuda_generator_where_the_value_is_made_on_the_gpu():
    probabilities = torch.ones(8, device=OFFLOAD) / 8 * 1
    generator = torch.Generator(device="cuda").manual_seed(3)
    expected = torch.multinomial(probabilities.cuda(), 4, generator=torch.Generator(device="cuda").manual_seed(3))
    assert_same(torch.multinomial(probabilities, 4, generator=generator), expected)
