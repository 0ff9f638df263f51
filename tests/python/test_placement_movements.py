"""Movements, writes and `out=` by the bytes that cross the link.

What is born on the device stays there until the host asks, and goes home once; what is born on the host stays there.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, CPU, HOST, OFFLOAD, assert_same, at
from placing import BYTES, NOTHING, SIZE, crossed, operands, place

import torch_offload

pytestmark = [pytest.mark.skipif(HOST, reason="there is no link"), pytest.mark.usefixtures("room")]
births = pytest.mark.parametrize("born", ["host", "device"])


def image(a):
    return a.view(1, SIZE, 4, 4)


def places(rows):
    return rows.expand(1, SIZE, 1, SIZE).contiguous()


MOVEMENTS = {
    "clone": lambda a, b, rows, mask: a.clone(),
    "contiguous": lambda a, b, rows, mask: a.t().contiguous(),
    "reshape": lambda a, b, rows, mask: a.t().reshape(8, -1),
    "cat": lambda a, b, rows, mask: torch.cat([a, b, a]),
    "stack": lambda a, b, rows, mask: torch.stack([a, b], 1),
    "vstack": lambda a, b, rows, mask: torch.vstack([a, b]),
    "cast": lambda a, b, rows, mask: a.to(torch.bfloat16),
    "cast up": lambda a, b, rows, mask: a.double(),
    "cast to integers": lambda a, b, rows, mask: a.to(torch.int32),
    "index": lambda a, b, rows, mask: a[rows],
    "index by a mask": lambda a, b, rows, mask: a[mask],
    "index_select": lambda a, b, rows, mask: a.index_select(1, rows),
    "gather": lambda a, b, rows, mask: a.gather(0, rows[None]),
    "take": lambda a, b, rows, mask: a.take(rows),
    "masked_select": lambda a, b, rows, mask: a.masked_select(mask),
    "embedding": lambda a, b, rows, mask: F.embedding(rows, a),
    "repeat": lambda a, b, rows, mask: a.repeat(2, 1),
    "tile": lambda a, b, rows, mask: a.tile(2, 2),
    "repeat_interleave": lambda a, b, rows, mask: a.repeat_interleave(2, 0),
    "flip": lambda a, b, rows, mask: a.flip(0),
    "roll": lambda a, b, rows, mask: a.roll(1, 0),
    "rot90": lambda a, b, rows, mask: a.rot90(),
    "pad": lambda a, b, rows, mask: F.pad(a, (1, 2)),
    "tril": lambda a, b, rows, mask: a.tril(),
    "triu": lambda a, b, rows, mask: a.triu(),
    "block_diag": lambda a, b, rows, mask: torch.block_diag(a, b),
    "where": lambda a, b, rows, mask: torch.where(mask, a, b),
    "masked_fill": lambda a, b, rows, mask: a.masked_fill(mask, 2.0),
    "masked_scatter": lambda a, b, rows, mask: a.masked_scatter(mask, b),
    "scatter": lambda a, b, rows, mask: a.scatter(0, rows[None], b),
    "index_put": lambda a, b, rows, mask: a.index_put((rows,), b),
    "slice_scatter": lambda a, b, rows, mask: a.slice_scatter(b[:4], 0, 2, 6),
    "select_scatter": lambda a, b, rows, mask: a.select_scatter(b[0], 0, 2),
    "diagonal_scatter": lambda a, b, rows, mask: a.diagonal_scatter(b[0]),
    "as_strided_scatter": lambda a, b, rows, mask: a.as_strided_scatter(b[:2], (2, SIZE), (SIZE, 1)),
    "split_copy": lambda a, b, rows, mask: torch.split_copy(a, 4),
    "index_copy": lambda a, b, rows, mask: a.index_copy(0, rows, b),
    "index_fill": lambda a, b, rows, mask: a.index_fill(0, rows[:3], 2.0),
    "put": lambda a, b, rows, mask: a.put(rows, b[0]),
    "unsafe index": lambda a, b, rows, mask: torch.ops.aten._unsafe_index(a, [rows]),
    "unsafe index_put": lambda a, b, rows, mask: torch.ops.aten._unsafe_index_put(a, [rows], b),
    "unsafe masked index": lambda a, b, rows, mask: torch.ops.aten._unsafe_masked_index(a[0], mask[0], [rows], 2.0),
    "pixel_shuffle": lambda a, b, rows, mask: F.pixel_shuffle(image(a), 2),
    "pixel_unshuffle": lambda a, b, rows, mask: F.pixel_unshuffle(image(a), 2),
    "channel_shuffle": lambda a, b, rows, mask: F.channel_shuffle(image(a), 2),
    "native_channel_shuffle": lambda a, b, rows, mask: F.native_channel_shuffle(image(a), 2),
    "unfold": lambda a, b, rows, mask: F.unfold(image(a), 2),
    "pad by reflection, 1d": lambda a, b, rows, mask: F.pad(a, (1, 2), "reflect"),
    "pad by reflection, 2d": lambda a, b, rows, mask: F.pad(image(a)[0], (1, 2, 1, 0), "reflect"),
    "pad by reflection, 3d": lambda a, b, rows, mask: F.pad(image(a), (1, 2, 1, 0, 2, 1), "reflect"),
    "pad by the border, 1d": lambda a, b, rows, mask: F.pad(a, (1, 2), "replicate"),
    "pad by the border, 2d": lambda a, b, rows, mask: F.pad(image(a)[0], (1, 2, 1, 0), "replicate"),
    "pad by the border, 3d": lambda a, b, rows, mask: F.pad(image(a), (1, 2, 1, 0, 2, 1), "replicate"),
    "max_unpool2d": lambda a, b, rows, mask: torch.ops.aten.max_unpool2d(a[None, :, None], places(rows), [4, 4]),
    "max_unpool3d": lambda a, b, rows, mask: torch.ops.aten.max_unpool3d(
        a[None, :, None, None], places(rows)[:, :, None], [1, 4, 4], [1, 1, 1], [0, 0, 0]
    ),
    "diag_embed": lambda a, b, rows, mask: torch.diag_embed(a),
    "complex": lambda a, b, rows, mask: torch.complex(a, b),
    "chunk_cat": lambda a, b, rows, mask: torch._chunk_cat([a, b], 0, 2),
    "alias_copy": lambda a, b, rows, mask: torch.alias_copy(a),
    "as_strided_copy": lambda a, b, rows, mask: torch.as_strided_copy(a, (4, 4), (1, SIZE)),
    "detach_copy": lambda a, b, rows, mask: torch.detach_copy(a),
    "diagonal_copy": lambda a, b, rows, mask: torch.diagonal_copy(a),
    "expand_copy": lambda a, b, rows, mask: torch.expand_copy(a[0], (3, SIZE)),
    "narrow_copy": lambda a, b, rows, mask: torch.narrow_copy(a, 0, 1, 3),
    "permute_copy": lambda a, b, rows, mask: torch.permute_copy(a, (1, 0)),
    "select_copy": lambda a, b, rows, mask: torch.select_copy(a, 0, 1),
    "slice_copy": lambda a, b, rows, mask: torch.slice_copy(a, 0, 1, 9, 2),
    "split_with_sizes_copy": lambda a, b, rows, mask: torch.split_with_sizes_copy(a, [4, 12]),
    "squeeze_copy": lambda a, b, rows, mask: torch.squeeze_copy(a[None]),
    "t_copy": lambda a, b, rows, mask: torch.t_copy(a),
    "transpose_copy": lambda a, b, rows, mask: torch.transpose_copy(a, 0, 1),
    "unbind_copy": lambda a, b, rows, mask: torch.unbind_copy(a),
    "unfold_copy": lambda a, b, rows, mask: torch.unfold_copy(a, 0, 2, 1),
    "unsqueeze_copy": lambda a, b, rows, mask: torch.unsqueeze_copy(a, 0),
    "view_copy": lambda a, b, rows, mask: torch.view_copy(a, (8, -1)),
    "view_as_complex_copy": lambda a, b, rows, mask: torch.view_as_complex_copy(a.view(SIZE, -1, 2)),
    "view_as_real_copy": lambda a, b, rows, mask: torch.view_as_real_copy(torch.view_as_complex(a.view(SIZE, -1, 2))),
}


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("name", MOVEMENTS)
def test_a_movement_of_what_was_born_on_the_device(name):
    given = operands("device")
    results = []
    assert crossed(lambda: results.extend(leaves(MOVEMENTS[name](*given)))) == NOTHING
    assert all(result.is_offload for result in results)
    assert crossed(lambda: [result * 1 for result in results]) == NOTHING, "they are where the next operation is"
    for result in results:
        held = result.untyped_storage().nbytes()
        assert crossed(result.cpu) == (0, held, 1)
        assert crossed(result.cpu) == NOTHING
    assert_same(results, leaves(MOVEMENTS[name](*operands("device", COMPUTE))))


@pytest.mark.parametrize("name", MOVEMENTS)
def test_a_movement_of_what_was_born_on_the_host(name):
    given = operands("host")
    results = []
    assert crossed(lambda: results.extend(leaves(MOVEMENTS[name](*given)))) == NOTHING
    assert all(result.is_offload for result in results)
    assert crossed(lambda: [result.cpu() for result in results]) == NOTHING
    assert_same(results, leaves(MOVEMENTS[name](*operands("host", CPU))))
    for result in results:
        assert crossed(lambda result=result: result.mul_(1)) == NOTHING, "born on the host as well"


# They have the name of a movement, and add.
SUMS = {
    "index_put": lambda a, b, rows, mask: a.index_put((rows,), b, accumulate=True),
    "unsafe index_put": lambda a, b, rows, mask: torch.ops.aten._unsafe_index_put(a, [rows], b, True),
    "put": lambda a, b, rows, mask: a.put(rows, b[0], accumulate=True),
    "scatter": lambda a, b, rows, mask: torch.scatter(a, 0, rows[None], b, reduce="add"),
    "scatter a number": lambda a, b, rows, mask: torch.scatter(a, 0, rows[None], 2.0, reduce="multiply"),
}


@births
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_a_new_value(name, born):
    """Wherever its operands were born, it stays on the device."""
    given = operands(born)
    SUMS[name](*given)  # now they are there
    results = []
    assert crossed(lambda: results.append(SUMS[name](*given))) == NOTHING
    assert crossed(lambda: results[0] * 1) == NOTHING
    assert crossed(results[0].cpu) == (0, BYTES, 1)
    assert_same(results[0], SUMS[name](*operands(born, COMPUTE)))


def test_operands_of_either_birth():
    """The device decides; the other operand is fetched, once."""
    a, b = place(at(CPU, SIZE, SIZE), "device"), at(OFFLOAD, SIZE, SIZE, seed=1)
    results = []
    for expected in ((BYTES, 0, 0), NOTHING):
        assert crossed(lambda: results.append(torch.cat([b, a]))) == expected
    assert crossed(lambda: results[0] * 1) == NOTHING
    assert crossed(results[0].cpu) == (0, 2 * BYTES, 1)
    assert_same(results[0], torch.cat([b.cpu(), a.cpu()]))


def test_the_cache_does_not_change_where_something_was_born():
    born_there, born_here = place(at(CPU, SIZE, SIZE), "device"), at(OFFLOAD, SIZE, SIZE, seed=1)
    results = []
    # At home, and on the device still.
    assert crossed(born_there.cpu) == (0, BYTES, 1)
    assert crossed(lambda: results.append(born_there.clone())) == NOTHING
    # At home alone: it is fetched for the movement, and only then.
    torch_offload.empty_cache()
    assert crossed(lambda: results.append(born_there.clone())) == (BYTES, 0, 0)
    assert crossed(lambda: results.append(born_there.flip(0))) == NOTHING
    assert crossed(lambda: results[1] * 1) == NOTHING
    # In the cache, for an operation before.
    assert crossed(lambda: born_here * 1) == (BYTES, 0, 0)
    assert crossed(lambda: results.append(born_here.clone())) == NOTHING
    assert crossed(lambda: results[3].mul_(1)) == NOTHING
    assert crossed(lambda: results[3] * 1) == (BYTES, 0, 0)


@pytest.mark.parametrize("name", ["index", "cat", "embedding", "where", "flip"])
def test_a_movement_whose_gradient_is_asked_for(name):
    """It is made on the device. The operand is fetched once, its gradient goes home once: from when it has been read once."""
    a, b, rows, mask = operands("host")
    b, rows, mask = place(b, "device"), place(rows, "device"), place(mask, "device")
    a.requires_grad_()
    results = []

    def backward():
        (results[-1] * weights).sum().backward()
        a.grad.cpu()

    for first in (True, False):
        a.grad = None
        moved = crossed(lambda: results.append(MOVEMENTS[name](a, b, rows, mask)))
        assert moved == ((BYTES, 0, 0) if first else NOTHING)
        weights = place(at(CPU, *results[0].shape, seed=3), "device")
        down, home, copies = crossed(backward)
        assert down <= 16, "the number that backward begins with"
        assert first or (home, copies) == (BYTES, 1)
        assert crossed(a.grad.cpu) == NOTHING
    plain, b, rows, mask = operands("host", COMPUTE)
    plain.requires_grad_()
    (MOVEMENTS[name](plain, b, rows, mask) * weights.to(COMPUTE)).sum().backward()
    assert_same(a.grad, plain.grad)


WRITES = {
    "add_": lambda a, b, rows, mask: a.add_(b),
    "addmm_": lambda a, b, rows, mask: a.addmm_(b, b),
    "lerp_": lambda a, b, rows, mask: a.lerp_(b, 0.5),
    "clamp_": lambda a, b, rows, mask: a.clamp_(-1, 1),
    "fill_": lambda a, b, rows, mask: a.fill_(2),
    "zero_": lambda a, b, rows, mask: a.zero_(),
    "masked_fill_": lambda a, b, rows, mask: a.masked_fill_(mask, 1.0),
    "setitem by a mask": lambda a, b, rows, mask: a.__setitem__(mask, b[mask]),
    "setitem by rows": lambda a, b, rows, mask: a.__setitem__(rows, b),
    "index_copy_": lambda a, b, rows, mask: a.index_copy_(0, rows, b),
    "index_fill_": lambda a, b, rows, mask: a.index_fill_(0, rows[:3], 2.0),
    "index_add_": lambda a, b, rows, mask: a.index_add_(0, rows, b),
    "scatter_": lambda a, b, rows, mask: a.scatter_(0, rows[None], b),
    "foreach": lambda a, b, rows, mask: torch._foreach_mul_([a], [b]),
    "copy_": lambda a, b, rows, mask: a.copy_(b),
    "foreach copy": lambda a, b, rows, mask: torch._foreach_copy_([a], [b]),
    "add_ to a transposed view": lambda a, b, rows, mask: a.t().add_(b),
}
PARTS = {
    "a row": lambda a, b, rows, mask: a[1].mul_(b[1]),
    "every other column": lambda a, b, rows, mask: a[1:, ::2].add_(b[1:, ::2]),
    "setitem": lambda a, b, rows, mask: a.__setitem__((slice(0, 2),), b[1:3]),
    "setitem of a number": lambda a, b, rows, mask: a.__setitem__((slice(0, 2),), 1.0),
    "fill_diagonal_": lambda a, b, rows, mask: a.fill_diagonal_(2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_what_was_born_on_the_device(name):
    given, plain = operands("device"), operands("device", COMPUTE)
    assert crossed(lambda: WRITES[name](*given)) == NOTHING
    assert crossed(lambda: WRITES[name](*given)) == NOTHING
    assert crossed(lambda: given[0] * 1) == NOTHING
    assert crossed(given[0].cpu) == (0, BYTES, 1)
    assert crossed(given[0].cpu) == NOTHING
    WRITES[name](*plain)
    WRITES[name](*plain)
    assert_same(given[0], plain[0])


@pytest.mark.parametrize("name", PARTS)
def test_a_write_to_a_part_of_what_was_born_on_the_device(name):
    """It is made on the device, where all of it is; a number comes from the host."""
    number = 4 if name == "setitem of a number" else 0
    given, plain = operands("device"), operands("device", COMPUTE)
    for _ in range(2):
        assert crossed(lambda: PARTS[name](*given)) in (NOTHING, (number, 0, 0))
        PARTS[name](*plain)
    assert crossed(lambda: given[0] * 1) == NOTHING
    assert crossed(given[0].cpu) == (0, BYTES, 1)
    assert crossed(given[0].cpu) == NOTHING
    assert_same(given[0], plain[0])


@pytest.mark.parametrize("name", PARTS)
def test_a_write_to_a_part_of_what_has_gone_home(name):
    """What was born on the device and is not in the cache is not fetched for it: the part goes home, or is written there."""
    given, plain = operands("device"), operands("device", COMPUTE)
    given[0].cpu()
    torch_offload.empty_cache()
    down, _, _ = crossed(lambda: PARTS[name](*given))
    assert down < 2 * BYTES, "of the operands, the parts"
    PARTS[name](*plain)
    assert_same(given[0], plain[0])


@pytest.mark.parametrize(
    "view", [(slice(None, None, 2),), (slice(None), slice(None, None, 2))], ids=["rows", "columns"]
)
@pytest.mark.parametrize(
    "write", [torch.Tensor.copy_, torch.Tensor.add_, torch.Tensor.zero_], ids=lambda write: write.__name__
)
def test_what_lies_between_the_elements_that_are_written_stays(write, view):
    """Of a view whose elements are first and last in the storage, and not all of it."""

    def changed(device):
        a = place(at(CPU, 7, 9), "device") if device == OFFLOAD else at(device, 7, 9)
        b = at(device, *a[view].shape, seed=1)
        write(a[view], *([] if write is torch.Tensor.zero_ else [b]))
        return a

    assert_same(changed(OFFLOAD), changed(COMPUTE))


@pytest.mark.parametrize("name", {**WRITES, **PARTS})
def test_a_write_to_what_was_born_on_the_host(name):
    write = {**WRITES, **PARTS}[name]
    given, plain = operands("host"), operands("host", CPU)
    assert crossed(lambda: write(*given)) == NOTHING
    assert crossed(given[0].cpu) == NOTHING
    write(*plain)
    assert_same(given[0], plain[0])
    # The device has seen an old value, so it gets the new one: all of it, once.
    given[0] * 1
    assert crossed(lambda: write(*given)) == NOTHING
    assert crossed(lambda: given[0] * 1) == (BYTES, 0, 0)
    assert crossed(lambda: given[0] * 1) == NOTHING


OUTS = {
    "add": lambda a, b, rows, mask, out: torch.add(a, b, out=out),
    "exp": lambda a, b, rows, mask, out: torch.exp(a, out=out),
    "mm": lambda a, b, rows, mask, out: torch.mm(a, b, out=out),
    "cumsum": lambda a, b, rows, mask, out: torch.cumsum(a, 0, out=out),
    "cat": lambda a, b, rows, mask, out: torch.cat([a[:4], b[4:]], out=out),
    "stack": lambda a, b, rows, mask, out: torch.stack([a[0], b[1]] * 8, out=out),
    "index_select": lambda a, b, rows, mask, out: torch.index_select(a, 0, rows, out=out),
    "gather": lambda a, b, rows, mask, out: torch.gather(a, 0, rows.expand(SIZE, SIZE), out=out),
    "where": lambda a, b, rows, mask, out: torch.where(mask, a, b, out=out),
    "matmul": lambda a, b, rows, mask, out: torch.matmul(a, b, out=out),
    "vstack": lambda a, b, rows, mask, out: torch.vstack([a[:4], b[4:]], out=out),
    "inner": lambda a, b, rows, mask, out: torch.inner(a, b, out=out),
}


@pytest.mark.parametrize("name", OUTS)
def test_out_that_was_born_on_the_device(name):
    given, out = operands("device"), place(torch.zeros(SIZE, SIZE), "device")
    assert crossed(lambda: OUTS[name](*given, out)) == NOTHING
    assert crossed(lambda: out * 1) == NOTHING
    assert crossed(out.cpu) == (0, BYTES, 1)
    assert crossed(out.cpu) == NOTHING
    assert_same(out, OUTS[name](*operands("device", COMPUTE), torch.zeros(SIZE, SIZE, device=COMPUTE)))


@pytest.mark.parametrize("name", OUTS)
def test_out_that_was_born_on_the_host(name):
    """Operands come home, each once; the result is there already."""
    for born in ("host", "device"):
        given, out = operands(born), torch.zeros(SIZE, SIZE).to(OFFLOAD)
        down, home, _ = crossed(lambda given=given, out=out: OUTS[name](*given, out))
        assert down == 0
        assert home <= (sum(tensor.nbytes for tensor in given) if born == "device" else 0)
        assert crossed(lambda given=given, out=out: OUTS[name](*given, out)) == NOTHING
        assert crossed(out.cpu) == NOTHING
        assert_same(out, OUTS[name](*operands("host", CPU), torch.zeros(SIZE, SIZE)))


@births
def test_beside_a_plain_operand(born):
    """Each offload operand is fetched, once; results are plain and nothing goes home."""
    a, b = place(at(CPU, SIZE, SIZE), born), at(COMPUTE, SIZE, SIZE, seed=1)
    results = []
    first = (BYTES, 0, 0) if born == "host" else NOTHING
    for run in (lambda: a @ b, lambda: torch.cat([a, b]), lambda: torch.where(b > 0, a, b), lambda: b.clone().add_(a)):
        assert crossed(lambda run=run: results.append(run())) == first
        first = NOTHING
    assert [result.device for result in results] == [COMPUTE] * 4


def test_factories_and_init_are_the_hosts():
    def make():
        made = [torch.zeros(4, 4, device=OFFLOAD), torch.randn(4, 4, device=OFFLOAD), torch.eye(4, device=OFFLOAD)]
        made += [torch.arange(9.0, device=OFFLOAD), torch.tensor([1.0, 2.0], device=OFFLOAD)]
        made += [torch.empty_like(made[0]).fill_(1), torch.zeros_like(made[1]), made[0].new_full((3,), 2.0)]
        torch.nn.init.kaiming_uniform_(made[0])
        torch.nn.init.orthogonal_(made[1])
        for tensor in made:
            tensor.mul_(2)

    assert crossed(make) == NOTHING
