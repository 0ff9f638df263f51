"""Where zeros, ones and memory without a value are born: where the first value is made that is written to them."""

import threading

import pytest
import torch
from helpers import COMPUTE, CPU, HOST, OFFLOAD, assert_same, at
from placing import BYTES, NOTHING, SIZE, crossed, operands, place
from torch import nn

import torch_offload

pytestmark = [pytest.mark.skipif(HOST, reason="there is no link"), pytest.mark.usefixtures("room")]


def zeroed(tensor):
    torch._foreach_zero_([tensor])
    return tensor


CONSTANTS = {
    "zeros": lambda d, x: torch.zeros(SIZE, SIZE, device=d),
    "ones": lambda d, x: torch.ones(SIZE, SIZE, device=d),
    "full": lambda d, x: torch.full((SIZE, SIZE), 3.0, device=d),
    "empty, filled": lambda d, x: torch.empty(SIZE, SIZE, device=d).fill_(2),
    "zeros_like": lambda d, x: torch.zeros_like(x),
    "new_full": lambda d, x: x.new_full((SIZE, SIZE), 2.0),
    "a list that is zeroed": lambda d, x: zeroed(torch.empty(SIZE, SIZE, device=d)),
}
FIRST = {
    "index_add_": lambda out, a, b, rows, mask: out.index_add_(0, rows, a),
    "index_copy_": lambda out, a, b, rows, mask: out.index_copy_(0, rows, a),
    "scatter_add_": lambda out, a, b, rows, mask: out.scatter_add_(0, rows[:, None].expand(-1, SIZE), a),
    "add_": lambda out, a, b, rows, mask: out.add_(a),
    "addmm_": lambda out, a, b, rows, mask: out.addmm_(a, b),
    "setitem by a mask": lambda out, a, b, rows, mask: out.__setitem__(mask, a[mask]),
    "copy_": lambda out, a, b, rows, mask: out.copy_(a),
    "foreach": lambda out, a, b, rows, mask: torch._foreach_add_([out], [a]),
    "out": lambda out, a, b, rows, mask: torch.mm(a, b, out=out),
}


@pytest.mark.parametrize("write", FIRST)
@pytest.mark.parametrize("constant", CONSTANTS)
def test_the_first_value_is_made_on_the_device(constant, write):
    """So the constant travels down once, if it is read, and nothing goes home until the host asks."""
    given, plain = operands("device"), operands("device", COMPUTE)
    out = CONSTANTS[constant](OFFLOAD, place(at(CPU, SIZE, SIZE), "host"))
    expected = CONSTANTS[constant](COMPUTE, plain[0])
    assert crossed(lambda: FIRST[write](out, *given)) in (NOTHING, (BYTES, 0, 0))
    assert crossed(lambda: FIRST[write](out, *given)) == NOTHING
    assert crossed(lambda: out.mul_(2)) == NOTHING, "born on the device"
    assert crossed(out.cpu) == (0, BYTES, 1)
    for _ in range(2):
        FIRST[write](expected, *plain)
    assert_same(out, expected.mul_(2))


@pytest.mark.parametrize("write", FIRST)
@pytest.mark.parametrize("constant", CONSTANTS)
def test_the_first_value_is_made_on_the_host(constant, write):
    given, plain = operands("host"), operands("host", CPU)
    out = CONSTANTS[constant](OFFLOAD, given[0])
    expected = CONSTANTS[constant](CPU, plain[0])
    assert crossed(lambda: FIRST[write](out, *given)) == NOTHING
    assert crossed(lambda: out.mul_(2)) == NOTHING
    assert crossed(out.cpu) == NOTHING
    FIRST[write](expected, *plain)
    assert_same(out, expected.mul_(2))
    update = place(at(CPU, SIZE, SIZE), "device")
    assert crossed(lambda: out.add_(update)) == (0, BYTES, 1), "it stays where it was born"


LIKE = {
    "zeros_like": lambda x: torch.zeros_like(x),
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.float64),
    "full_like": lambda x: torch.full_like(x, 3.0),
    "new_zeros": lambda x: x.new_zeros(3, 5),
    "new_ones": lambda x: x.new_ones((3, 5), dtype=torch.int32),
    "new_full": lambda x: x.new_full((3, 5), 1.5),
    "of a transposed one": lambda x: torch.ones_like(x.t()),
    "of another layout": lambda x: torch.ones_like(x.view(1, SIZE, 4, 4), memory_format=torch.channels_last),
    "of a part": lambda x: torch.full_like(x[1:, ::2], 2.0),
}


@pytest.mark.parametrize("name", LIKE)
def test_a_constant_like_what_was_born_on_the_device(name):
    made = LIKE[name](place(at(CPU, SIZE, SIZE), "device"))
    assert crossed(lambda: LIKE[name](place(at(CPU, SIZE, SIZE), "device")))[1:] == (0, 0)
    assert crossed(lambda: made + 1) == NOTHING
    assert crossed(made.cpu) == (0, made.nbytes, 1), "nothing of it was made on the host"
    expected = LIKE[name](at(COMPUTE, SIZE, SIZE))
    assert_same(made, expected)
    assert made.stride() == expected.stride()


@pytest.mark.parametrize("name", LIKE)
def test_a_constant_like_what_was_born_on_the_device_in_a_scope_of_the_host(name):
    like = place(at(CPU, SIZE, SIZE), "device")
    with torch_offload.on_host():
        made = LIKE[name](like)
        assert crossed(made.cpu) == NOTHING
    assert_same(made, LIKE[name](at(CPU, SIZE, SIZE)))


DRAWN = {
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "empty_like, normal_": lambda x: torch.empty_like(x).normal_(),
    "zeros_like, bernoulli_": lambda x: x.new_empty(SIZE, SIZE).bernoulli_(x.sigmoid().to("cpu").to(x.device)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_stay_those_of_the_host(name):
    """Whatever their operands were born of."""
    torch.manual_seed(3)
    made = DRAWN[name](place(at(CPU, SIZE, SIZE), "device"))
    torch.manual_seed(3)
    assert_same(made, DRAWN[name](at(CPU, SIZE, SIZE)))


def test_a_write_at_random_is_drawn_on_the_host():
    chances = place(at(CPU, SIZE, SIZE).sigmoid(), "device")
    torch.manual_seed(3)
    made = torch.empty(SIZE, SIZE, device=OFFLOAD).bernoulli_(chances)
    assert crossed(made.cpu) == NOTHING
    torch.manual_seed(3)
    assert_same(made, torch.empty(SIZE, SIZE).bernoulli_(chances.cpu()))


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, SIZE, device=OFFLOAD))
        self.register_buffer("mean", torch.zeros(SIZE, SIZE, device=OFFLOAD))


def parameter():
    return Holder().weight


def leaf():
    return torch.zeros(SIZE, SIZE, device=OFFLOAD, requires_grad=True)


def buffer():
    return Holder().mean


@pytest.mark.parametrize("make", [parameter, leaf, buffer])
def test_what_a_model_has_is_born_on_the_host(make):
    """Also where its first value is zero, and the one that is written to it comes from the device."""
    tensor, update = make(), place(at(CPU, SIZE, SIZE), "device")
    with torch.no_grad():
        tensor.add_(update)
        assert crossed(tensor.cpu) == NOTHING
        assert crossed(lambda: tensor.mul_(2)) == NOTHING
    assert_same(tensor.detach(), at(CPU, SIZE, SIZE) * 2)


def test_state_of_an_optimizer_is_born_on_the_host():
    weight = place(at(CPU, SIZE, SIZE), "host").requires_grad_()
    optimizer = torch.optim.Adam([weight])
    (weight * place(at(CPU, SIZE, SIZE, seed=1), "device")).sum().backward()
    optimizer.step()
    torch_offload.synchronize()
    for value in optimizer.state[weight].values():
        assert crossed(value.cpu) == NOTHING


def test_a_copy_from_the_compute_device_or_the_cpu_goes_to_the_host():
    for source in (at(CPU, SIZE, SIZE), at(COMPUTE, SIZE, SIZE)):
        buffer = torch.empty(SIZE, SIZE, device=OFFLOAD)
        buffer.copy_(source)
        torch_offload.synchronize()
        assert crossed(buffer.cpu) == NOTHING
        assert crossed(lambda buffer=buffer: buffer.add_(1)) == NOTHING
        assert_same(buffer, source.cpu() + 1)


def test_experts_whose_outputs_are_added_up():
    """As transformers mixes them, fed with offload tensors: once the weights are there nothing crosses the link."""
    tokens, experts = 12, 3
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(experts)).to(COMPUTE)
    model = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(experts))
    model.load_state_dict(plain.state_dict())
    model.to(OFFLOAD)

    def mix(model, x, picks, factory):
        total = factory(x)
        for expert in range(experts):
            (rows,) = torch.where(picks == expert)
            total.index_add_(0, rows, model[expert](x[rows]))
        return total

    ways = {"zeros": lambda x: torch.zeros(x.shape, dtype=x.dtype, device=x.device), "zeros_like": torch.zeros_like}
    x, picks = at(CPU, tokens, SIZE), torch.arange(tokens) % experts
    given = place(x, "device"), place(picks, "device")
    for name, factory in ways.items():
        with torch.no_grad():
            result = mix(model, *given, factory)
            down, home, _ = crossed(lambda factory=factory: mix(model, *given, factory))
            assert down == (x.nbytes if name == "zeros" else 0)
            assert home <= 8 * experts, "how many rows there are"
            assert_same(result, mix(plain, x.to(COMPUTE), picks.to(COMPUTE), factory))


@pytest.mark.parametrize("born", ["undecided", "host", "device"])
def test_views_that_overlap_themselves(born):
    """What is written to one element is written to those that share its memory."""
    tensors = {}
    for device in (OFFLOAD, CPU):
        made = torch.zeros(8, device=device)
        if device == OFFLOAD and born != "undecided":
            made = place(torch.zeros(8), born)
        ones = place(torch.ones(1, 2), "device").to(device)
        windows = made.unfold(0, 2, 1)
        windows.index_copy_(0, torch.tensor([3], device=device), ones)
        windows[torch.tensor([[False, True]] + [[False, False]] * 6, device=device)] = 5.0
        tensors[device] = made
    assert_same(tensors[OFFLOAD], tensors[CPU])
    assert tensors[CPU].tolist() == [0, 5, 0, 1, 1, 0, 0, 0]


def test_a_part_of_what_is_shared_is_all_that_is_written():
    """Other processes may be writing to the rest."""
    shared, row = place(at(CPU, SIZE, SIZE), "device"), place(at(CPU, SIZE, seed=1), "device")
    shared.share_memory_()
    shared.sum()
    _, home, _ = crossed(lambda: shared[2].copy_(row))
    assert home <= 2 * row.nbytes
    assert_same(shared[2], row)


def test_threads_write_to_parts_of_one_tensor():
    """Nothing of what another one has written meanwhile is lost."""
    rows, threads = 32, 4
    sources = [place(torch.full((SIZE,), float(row)), "device") for row in range(rows)]
    for _ in range(20):
        out = place(torch.full((rows, SIZE), -1.0), "device")

        def write(first, out=out):
            for row in range(first, rows, threads):
                out[row] = sources[row]

        workers = [threading.Thread(target=write, args=(first,)) for first in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert_same(out, torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, SIZE))


@pytest.mark.memcheck
def test_a_part_is_written_where_the_whole_is():
    """In the cache's memory, with no copy of the whole."""
    whole = place(at(CPU, SIZE, SIZE), "device")
    row = place(at(CPU, SIZE, seed=1), "device")
    expected = at(CPU, SIZE, SIZE)
    given_up = torch_offload.stats()["evictions"]
    for k in range(0, SIZE, 2):
        _, home, _ = crossed(lambda k=k: whole[k].copy_(row))
        assert home == 0
        whole[:, k] = row.to(torch.bfloat16)
        expected[k] = row.cpu()
        expected[:, k] = row.cpu().to(torch.bfloat16)
    assert torch_offload.stats()["evictions"] - given_up <= SIZE // 2  # of what the casts have made
    assert_same(whole, expected)


def test_memory_that_an_operation_has_kept_is_not_written():
    kept = []

    @torch.library.custom_op("births::keeps", mutates_args=())
    def keeps(x: torch.Tensor) -> torch.Tensor:
        kept.append(x + 1)
        return kept[-1].view_as(kept[-1])

    value = at(CPU, SIZE, SIZE)
    whole = keeps(place(value, "device"))
    whole[0] = place(at(CPU, SIZE, seed=1), "device")
    assert_same(kept[0], value + 1)
    assert_same(whole[0], at(CPU, SIZE, seed=1))
    assert_same(whole[1:], value[1:] + 1)


def test_a_copy_into_freed_memory_says_so():
    source, target = place(at(CPU, 4), "device"), place(at(CPU, 4), "device")
    target.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="needs 16 bytes of its storage, which has 0"):
        target.copy_(source)


@pytest.mark.memcheck
@pytest.mark.parametrize("way", ["index_copy_", "slices"])
def test_keys_of_a_static_cache(way):
    """What is written token by token stays on the device, and comes home once."""
    length = 6

    def append(cache, k, step):
        if way == "slices":
            cache[:, step] = k
        else:
            cache.index_copy_(1, torch.tensor([step], device=cache.device), k[:, None])

    cache, expected = torch.zeros(2, length, SIZE, device=OFFLOAD), torch.zeros(2, length, SIZE, device=COMPUTE)
    keys = [place(at(CPU, 2, SIZE, seed=step), "device") for step in range(length)]
    for step, k in enumerate(keys):
        _, home, _ = crossed(lambda k=k, step=step: append(cache, k, step))
        assert home <= (k.nbytes if step == 0 else 0)
        down, home, _ = crossed(cache.sum)
        assert (down, home) == (0, 0) or (way == "slices" and step == 0)
        append(expected, k.to(COMPUTE), step)
    assert_same(cache, expected)
