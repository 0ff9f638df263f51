"""Making offload tensors: every factory and initialisation, with the CPU's values, strides and dtypes."""

import contextlib

import pytest
import torch
from helpers import COMPUTE, CPU, HOST, OFFLOAD, assert_same, at, deterministic
from torch import nn

import torch_offload

FACTORIES = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, 3, dtype=torch.int16, device=d),
    "full": lambda d: torch.full((2, 3), 7.5, dtype=torch.float64, device=d),
    "full of a bool": lambda d: torch.full((2,), True, device=d),
    "arange": lambda d: torch.arange(1, 10, 3, device=d),
    "arange of floats": lambda d: torch.arange(0.0, 1.0, 0.1, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 7, device=d),
    "logspace": lambda d: torch.logspace(0, 1, 5, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor of a scalar": lambda d: torch.tensor(2.5, device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0, 2.0], device=d),
    "asarray": lambda d: torch.asarray([1.0, 2.0], device=d),
    "complex": lambda d: torch.ones(2, dtype=torch.complex64, device=d) * 1j,
    "hann_window": lambda d: torch.hann_window(8, device=d),
    "hamming_window": lambda d: torch.hamming_window(8, device=d),
    "blackman_window": lambda d: torch.blackman_window(8, device=d),
    "blackman_window, symmetric": lambda d: torch.blackman_window(9, False, dtype=torch.float64, device=d),
    "bartlett_window": lambda d: torch.bartlett_window(8, dtype=torch.float64, device=d),
    "kaiser_window": lambda d: torch.kaiser_window(8, device=d),
    "kaiser_window of doubles": lambda d: torch.kaiser_window(8, False, 8.0, dtype=torch.float64, device=d),
    "kaiser_window, symmetric": lambda d: torch.kaiser_window(8, False, dtype=torch.bfloat16, device=d),
    "kaiser_window of nothing": lambda d: torch.kaiser_window(0, device=d),
    "signal.windows.kaiser": lambda d: torch.signal.windows.kaiser(8, device=d),
    "range": lambda d: torch.range(0, 4, device=d),
    "fftfreq": lambda d: torch.fft.fftfreq(5, device=d),
    "rfftfreq": lambda d: torch.fft.rfftfreq(5, device=d),
    "empty then fill": lambda d: torch.empty(2, 3, device=d).fill_(4),
    "empty then zero": lambda d: torch.empty(2, 3, device=d).zero_(),
    "empty of nothing": lambda d: torch.empty(0, 3, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(1),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3, 4), (2, 0, 1), device=d).fill_(1),
    "channels_last": lambda d: torch.empty(1, 2, 3, 4, memory_format=torch.channels_last, device=d).fill_(1),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(3, 2, device=d).t()),
    "ones_like of a dtype": lambda d: torch.ones_like(torch.ones(3, device=d), dtype=torch.int64),
    "full_like": lambda d: torch.full_like(torch.ones(3, device=d), 5),
    "empty_like": lambda d: torch.empty_like(torch.ones(2, 3, 4, device=d).permute(2, 0, 1)).fill_(2),
    "new_zeros": lambda d: torch.ones(3, device=d).new_zeros(2, 2),
    "new_tensor": lambda d: torch.ones(3, device=d).new_tensor([1.0, 2.0]),
    "new_empty": lambda d: torch.ones(3, device=d).new_empty(2).fill_(1),
    "scalar_tensor": lambda d: torch.scalar_tensor(3, device=d),
    "requires_grad": lambda d: torch.ones(3, device=d, requires_grad=True),
    "uint8": lambda d: torch.full((5,), 200, dtype=torch.uint8, device=d),
    "float8": lambda d: torch.zeros(5, dtype=torch.float8_e4m3fn, device=d),
    "bfloat16": lambda d: torch.full((5,), 1.2, dtype=torch.bfloat16, device=d),
    "vander": lambda d: torch.vander(torch.arange(3.0, device=d)),
    "cartesian_prod": lambda d: torch.cartesian_prod(torch.arange(2, device=d), torch.arange(3, device=d)),
    "from blob of bytes": lambda d: torch.frombuffer(bytearray(range(8)), dtype=torch.uint8).to(d),
    "randn": lambda d: torch.randn(2, 3, device=d),
    "rand_like": lambda d: torch.rand_like(torch.ones(3, device=d)),
    "randint_like": lambda d: torch.randint_like(torch.ones(3, device=d), 9),
    "normal": lambda d: torch.normal(0.0, 1.0, (3,), device=d),
}


@pytest.mark.parametrize(
    "device", ["offload", "offload:0", torch.device("offload"), torch.device("offload", 0)], ids=repr
)
@pytest.mark.parametrize("name", FACTORIES)
def test_factory(name, device):
    torch.manual_seed(4)
    expected = FACTORIES[name](CPU)
    torch.manual_seed(4)
    actual = FACTORIES[name](device)
    assert actual.device == torch.device("offload:0")
    assert_same(actual, expected)
    assert actual.stride() == expected.stride()
    assert actual.requires_grad == expected.requires_grad
    assert actual.is_offload


@pytest.mark.parametrize("source", [CPU, COMPUTE], ids=str)
def test_like_another_device(source):
    x = torch.ones(3, 2, device=source)
    assert torch.zeros_like(x, device=OFFLOAD).device.type == "offload"
    assert x.new_zeros(4, device=OFFLOAD).device.type == "offload"
    back = torch.ones_like(torch.zeros(3, device=OFFLOAD), device=source)
    assert back.device == source
    assert_same(back, torch.ones(3))
    assert torch.zeros(3, device=OFFLOAD).new_full((2,), 4.0, device=source).device == source


def test_default_device_context():
    with torch.device("offload"):
        a = torch.randn(3, 2)
        b = torch.nn.Linear(3, 2)
        c = torch.tensor([1, 2])
    assert a.device == b.weight.device == c.device == torch.device("offload:0")
    assert torch.ones(1).device == CPU


def test_a_model_that_is_made_on_the_device_has_the_cpus_weights():
    def make():
        return torch.nn.Sequential(
            torch.nn.Linear(5, 4), torch.nn.LSTM(4, 3), torch.nn.Conv2d(2, 3, 3), torch.nn.Embedding(7, 3)
        )

    torch.manual_seed(11)
    plain = make()
    torch.manual_seed(11)
    with torch.device("offload"):
        made = make()
    torch.manual_seed(11)
    moved = make().to("offload")
    for p, q, r in zip(plain.parameters(), made.parameters(), moved.parameters(), strict=True):
        assert q.device.type == r.device.type == "offload"
        assert_same(q, p)
        assert_same(r, p)


def test_set_default_device():
    torch.set_default_device("offload")
    try:
        assert torch.ones(2).device.type == "offload"
        assert torch.nn.Linear(2, 2).weight.device.type == "offload"
    finally:
        torch.set_default_device(None)
    assert torch.ones(2).device == CPU


@pytest.fixture
def defaults():
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def made_and_trained(default_device, fed, dtype):
    """A model that is built where the default says, of its dtype, with values from outside; and what a step of it gives."""
    torch.set_default_device(default_device)
    torch.set_default_dtype(dtype)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for seed, parameter in enumerate(net.parameters()):
            parameter.copy_(at("cpu", *parameter.shape, seed=seed))
    x = torch.empty(4, 5).copy_(at("cpu", 4, 5, seed=9)).to(fed)
    result = net(x) * torch.arange(1, 3).to(x)
    result.square().mean().backward()
    assert {parameter.dtype for parameter in net.parameters()} == {x.dtype} == {result.dtype} == {dtype}
    assert {parameter.device.type for parameter in net.parameters()} == {torch.device(default_device).type}
    assert result.device.type == x.device.type
    return result, [parameter.grad for parameter in net.parameters()]


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fed", ["offload", COMPUTE.type])
def test_a_model_made_with_defaults(fed, dtype):
    with deterministic():
        plain = made_and_trained(COMPUTE, COMPUTE, dtype)
        assert_same(made_and_trained("offload", fed, dtype), plain)


def test_meta_to_offload():
    with torch.device("meta"):
        net = torch.nn.Linear(3, 2)
    net.to_empty(device="offload")
    assert net.weight.device.type == "offload"
    assert torch.zeros(3, device=OFFLOAD).to("meta").device.type == "meta"
    assert torch.empty_like(torch.zeros(3, device="meta"), device=OFFLOAD).device.type == "offload"


def test_from_lists_of_tensors_and_numpy():
    pieces = [torch.tensor(1.0, device=OFFLOAD), torch.tensor(2.0, device=OFFLOAD)]
    assert_same(torch.stack(pieces), torch.tensor([1.0, 2.0]))
    assert_same(torch.tensor(pieces, device=OFFLOAD), torch.tensor([1.0, 2.0]))
    array = torch.arange(3).numpy()
    assert_same(torch.as_tensor(array, device=OFFLOAD), torch.arange(3))
    assert_same(torch.tensor(array, device=OFFLOAD), torch.arange(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.randn(3, 4, device=d),
        lambda d: torch.rand(3, 4, device=d),
        lambda d: torch.randint(0, 9, (3, 4), device=d),
        lambda d: torch.randperm(7, device=d),
        lambda d: torch.empty(3, 4, device=d).normal_(),
        lambda d: torch.empty(3, 4, device=d).uniform_(-1, 1),
        lambda d: torch.empty(3, 4, device=d).bernoulli_(0.3),
        lambda d: torch.empty(3, 4, device=d).exponential_(),
        lambda d: nn.init.kaiming_uniform_(torch.empty(3, 4, device=d)),
        lambda d: nn.init.xavier_normal_(torch.empty(3, 4, device=d)),
        lambda d: nn.init.trunc_normal_(torch.empty(3, 4, device=d)),
        lambda d: nn.init.orthogonal_(torch.empty(3, 4, device=d)),
        lambda d: nn.init.sparse_(torch.empty(3, 4, device=d), 0.5),
        lambda d: nn.init.dirac_(torch.empty(3, 4, 3, device=d)),
        lambda d: nn.init.eye_(torch.empty(3, 4, device=d)),
    ],
)
def test_random_numbers_are_the_cpus(make):
    torch.manual_seed(3)
    expected = make(CPU)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    actual = make(OFFLOAD)
    assert actual.device.type == "offload"
    assert_same(actual, expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_is_set_to():
    whole = torch.ones(3, 2, device=OFFLOAD)
    assert whole.is_set_to(whole)
    assert whole.view(3, 2).is_set_to(whole)
    assert not whole.t().is_set_to(whole)
    assert not whole[1:].is_set_to(whole)
    assert not whole.clone().is_set_to(whole)


@contextlib.contextmanager
def algorithms_that_are_deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("fills", [True, False], ids=["fills", "fills nothing"])
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.empty(64, dtype=dtype, device=OFFLOAD),
        lambda dtype: torch.empty_strided((8, 8), (1, 8), dtype=dtype, device=OFFLOAD),
        lambda dtype: torch.empty_like(torch.zeros(64, dtype=dtype, device=OFFLOAD)),
        lambda dtype: torch.zeros(1, dtype=dtype, device=OFFLOAD).new_empty(64),
        lambda dtype: torch.zeros(3, dtype=dtype, device=OFFLOAD).resize_(67)[3:],
    ],
    ids=["empty", "empty_strided", "empty_like", "new_empty", "resize_"],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_uninitialised_memory_of_deterministic_algorithms(dtype, make, fills, monkeypatch):
    """As PyTorch's own devices: one value where there would be what somebody has left behind."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fills)
    left_behind = [torch.full((length,), 7, dtype=dtype, device=OFFLOAD) for length in (64, 67) for _ in range(64)]
    del left_behind
    with algorithms_that_are_deterministic():
        made, expected = make(dtype), torch.empty(64, dtype=dtype)
    if fills:
        assert_same(made.reshape(-1), expected)
    elif dtype == torch.int64:  # of others poisoned memory may be what PyTorch fills with
        assert (made != torch.iinfo(dtype).max).any()


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_what_is_filled_may_still_be_born_on_the_device():
    """Memory that an operation of the device then writes to is the device's, as without."""

    def moved():
        x = at(OFFLOAD, 4) * 2  # born there
        result = torch.empty(4, device=OFFLOAD)
        before = torch_offload.memory_stats()
        torch.add(x, x, out=result)
        assert_same(result * 2, at(CPU, 4) * 8)
        after = torch_offload.memory_stats()
        return after["cache.fetches"] - before["cache.fetches"]

    expected = moved()
    with algorithms_that_are_deterministic():
        assert moved() == expected > 0
