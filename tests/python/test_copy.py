"""Copies: every direction, dtype and layout, with the bits of a copy on the CPU."""

import itertools
import random

import pytest
import torch
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same

import torch_offload

PLACES = {"offload": OFFLOAD, "cpu": CPU, "cuda": COMPUTE} if GPU else {"offload": OFFLOAD, "cpu": CPU}
WAYS = [(a, b) for a, b in itertools.product(PLACES, PLACES) if "offload" in (a, b)]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
OTHERS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.complex32]


def numbers(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 100, tuple(shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(drawn.double(), drawn.flip(0).double() if drawn.dim() else drawn.double()).to(dtype)
    if dtype.is_floating_point:
        return (drawn.double() / 8).to(dtype)
    return drawn.to(dtype)


# Of a contiguous tensor of 6 x 8 a view, by name.
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "rows": lambda t: t[1:5],
    "every other row": lambda t: t[::2],
    "columns": lambda t: t[:, 2:7],
    "every third column": lambda t: t[:, ::3],
    "diagonal": lambda t: t.diagonal(),
    "one row": lambda t: t[3],
    "one column": lambda t: t[:, 3],
    "0-dim": lambda t: t[2, 5],
    "empty": lambda t: t[3:3],
    "expanded": lambda t: t[2:3].expand(4, 8),
    "overlapping": lambda t: t.as_strided((5, 4), (2, 1), 3),
    "four dims": lambda t: t.view(1, 3, 2, 8).permute(0, 3, 1, 2),
    "channels_last": lambda t: t.view(1, 3, 2, 8).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_to_keeps_values_and_strides(source, target, layout):
    plain = LAYOUTS[layout](numbers((6, 8), torch.float32))
    start = LAYOUTS[layout](numbers((6, 8), torch.float32).to(PLACES[source]))
    moved = start.to(PLACES[target])
    assert moved.device.type == PLACES[target].type
    assert_same(moved, plain)
    copied = start.to(PLACES[target], copy=True)
    assert_same(copied, plain)
    assert copied.stride() == plain.to(CPU, copy=True).stride()


@pytest.mark.parametrize("target_layout", [n for n in LAYOUTS if n not in ("expanded", "overlapping", "empty")])
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_copy_into_a_view(source, target, target_layout):
    """Bytes outside of the view stay what they were."""
    whole = numbers((6, 8), torch.float32)
    expected = whole.clone()
    into = LAYOUTS[target_layout](expected)
    for layout in ("contiguous", "strided", "one value"):
        base = whole.to(PLACES[target])
        actual = LAYOUTS[target_layout](base)
        if target_layout == "channels_last":
            base = actual
            expected = into
        data = numbers(into.shape, torch.float32, seed=3)
        if layout == "strided" and into.dim() > 1:
            data = data.transpose(0, -1).contiguous().transpose(0, -1)
        elif layout == "one value":
            data = data.reshape(-1)[:1].reshape([1] * into.dim())
        into.copy_(data)
        actual.copy_(data.to(PLACES[source]))
        assert_same(base, expected)


@pytest.mark.parametrize(("source", "target"), WAYS)
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("of", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
def test_dtype_pairs(source, target, of, to):
    plain = numbers((3, 5), of)
    start = plain.to(PLACES[source])
    assert_same(start.to(PLACES[target], to), plain.to(to))
    into = torch.zeros(5, 3, dtype=to, device=PLACES[target]).t()
    into.copy_(start)
    assert_same(into, plain.to(to))


@pytest.mark.gpu
def test_the_gpu_converts():
    """So what crosses the link has the dtype of the offload side, and the host computes nothing."""

    def carried(copy):
        before = torch_offload.memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = copy()
            torch.cuda.synchronize()
        after = torch_offload.memory_stats()
        kernels = [event.name for event in profile.events() if "elementwise" in event.name]
        return (
            result,
            len(kernels),
            *(after[name] - before[name] for name in ("link.bytes_to_device", "link.bytes_to_host")),
        )

    plain = torch.randn(1000, 100)
    large, small = plain.to("offload"), plain.bfloat16().to("offload")
    result, kernels, down, up = carried(lambda: large.to("cuda", torch.bfloat16))
    assert (kernels, down, up) == (1, large.nbytes, 0)
    assert_same(result, plain.bfloat16())
    result, kernels, down, up = carried(lambda: small.copy_(plain.cuda() * 2))
    assert (kernels, down, up) == (2, 0, small.nbytes)
    assert_same(result, (plain * 2).bfloat16())


@pytest.mark.parametrize(("source", "target"), WAYS)
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_rare_dtypes(source, target, dtype):
    plain = numbers((3, 5), torch.float32).to(dtype)
    assert_same(plain.to(PLACES[source]).to(PLACES[target]), plain)
    assert_same(plain.to(PLACES[source]).clone().to(PLACES[target]), plain)


@pytest.mark.parametrize(("source", "target"), WAYS)
@pytest.mark.parametrize("seed", range(30))
def test_random_layouts(source, target, seed):
    """Random shapes, orders of dims, slices, dtypes and broadcasts; what isn't written to stays."""
    draw = random.Random(seed)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool]
    of, to = draw.choice(dtypes), draw.choice(dtypes)
    dims = draw.randint(0, 4)
    shape = [draw.choice([0, 1, 1, 2, 3, 4, 5]) if draw.random() < 0.95 else 7 for _ in range(dims)]

    def view_of(base, order, cuts):
        view = base.permute(order)
        for dim, (begin, step) in enumerate(cuts):
            view = view[(slice(None),) * dim + (slice(begin, begin + step * shape[dim], step),)]
        return view

    def recipe():
        order = list(range(dims))
        draw.shuffle(order)
        cuts = [(draw.randint(0, 2), draw.randint(1, 2)) for _ in range(dims)]
        sizes = [0] * dims
        for dim, (begin, step) in enumerate(cuts):
            sizes[order[dim]] = begin + step * shape[dim]
        return sizes, order, cuts

    source_sizes, *source_view = recipe()
    target_sizes, *target_view = recipe()
    source_base, target_base = numbers(source_sizes, of, seed), numbers(target_sizes, to, seed + 1)
    expected = target_base.clone()
    actual = target_base.to(PLACES[target])
    non_blocking = draw.random() < 0.5
    whole = source_base.to(PLACES[source])
    from_plain, from_there = view_of(source_base, *source_view), view_of(whole, *source_view)
    if dims and draw.random() < 0.3:
        from_plain, from_there = from_plain[:1], from_there[:1]
    into_plain, into_there = view_of(expected, *target_view), view_of(actual, *target_view)
    into_plain.copy_(from_plain)
    into_there.copy_(from_there, non_blocking=non_blocking)
    del whole, from_there  # while the copy may be under way
    assert_same(actual, expected)
    assert_same(
        view_of(source_base.to(PLACES[source]), *source_view).to(PLACES[target]), view_of(source_base, *source_view)
    )


@pytest.mark.parametrize(("source", "target"), WAYS)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views(source, target, dtype):
    plain = numbers((3, 4), dtype)
    start = plain.to(PLACES[source])
    assert start.conj().is_conj()
    assert_same(start.conj().to(PLACES[target]), plain.conj())
    assert_same(start.conj().clone().to(PLACES[target]), plain.conj())
    assert_same(start.conj().imag.to(PLACES[target]), plain.conj().imag)  # a negative view
    assert_same(torch.view_as_real(start).to(PLACES[target]), torch.view_as_real(plain))
    into = torch.zeros(3, 4, dtype=dtype, device=PLACES[target])
    into.conj().copy_(start)
    assert_same(into, plain.conj())
    into.copy_(start.conj())
    assert_same(into, plain.conj())
    into.imag.copy_(start.real)
    expected = plain.conj().clone()
    expected.imag.copy_(plain.real)
    assert_same(into, expected)


@pytest.mark.parametrize(("source", "target"), WAYS)
@pytest.mark.parametrize("non_blocking", [False, True])
def test_non_blocking_is_never_seen(source, target, non_blocking):
    plain = numbers((64, 64), torch.float32)
    start = plain.to(PLACES[source], copy=True)
    for k in range(8):
        moved = start.to(PLACES[target], non_blocking=non_blocking)
        if not (non_blocking and PLACES[target] == CPU and PLACES[source].type == "cuda"):
            assert_same(moved, plain + k)
        start.add_(1)  # what was copied must be the old value


def test_copy_onto_itself():
    t = numbers((4, 4), torch.float32).to(OFFLOAD)
    t.copy_(t)
    assert_same(t, numbers((4, 4), torch.float32))
    t.copy_(t.t().clone())
    assert_same(t, numbers((4, 4), torch.float32).t().contiguous())


@pytest.mark.parametrize("cut", [(slice(1, None), slice(None, -1)), (slice(None, -2), slice(2, None))])
def test_copy_between_views_that_overlap_is_pytorchs_error(cut):
    t = torch.arange(8.0, device=OFFLOAD)
    with pytest.raises(
        RuntimeError, match="some elements of the input tensor and the written-to tensor refer to a single"
    ):
        t[cut[0]].copy_(t[cut[1]])
    assert_same(t, torch.arange(8.0))
    t[:4].copy_(t[4:])
    assert t.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_versions(source, target):
    start = torch.ones(4, device=PLACES[source])
    into = torch.zeros(4, device=PLACES[target])
    before = into._version, start._version
    into.copy_(start)
    assert (into._version, start._version) == (before[0] + 1, before[1])
    into[1:].copy_(start[1:])
    assert into._version == before[0] + 2
    into[0] = 5
    assert into._version == before[0] + 3


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_zero_size(source, target):
    for shape in [(0,), (0, 3), (3, 0, 2)]:
        start = torch.empty(shape, device=PLACES[source])
        assert start.to(PLACES[target]).shape == shape
        torch.empty(shape, device=PLACES[target]).copy_(start)
    into = numbers((3,), torch.float32).to(PLACES[target])
    into[3:].copy_(torch.empty(0, device=PLACES[source]))
    assert_same(into, numbers((3,), torch.float32))


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_scalars(source, target):
    start = torch.tensor(2.5, device=PLACES[source])
    assert start.to(PLACES[target]).item() == 2.5
    assert float(start.to(PLACES[target])) == 2.5
    into = torch.zeros(2, 3, device=PLACES[target])
    into.copy_(start)
    assert_same(into, torch.full((2, 3), 2.5))
    into[1, 1] = torch.tensor(4, device=PLACES[source])
    assert into.tolist() == [[2.5] * 3, [2.5, 4.0, 2.5]]


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_shape_mismatch(source, target):
    into = torch.zeros(2, 3, device=PLACES[target])
    with pytest.raises(RuntimeError, match=r"must match|expand|broadcast"):
        into.copy_(torch.zeros(4, device=PLACES[source]))
    assert_same(into, torch.zeros(2, 3))


@pytest.mark.memcheck
@pytest.mark.parametrize(("source", "target"), WAYS)
def test_memory_formats(source, target):
    plain = numbers((2, 3, 4, 5), torch.float32)
    for memory_format in (torch.channels_last, torch.contiguous_format, torch.preserve_format):
        moved = plain.to(PLACES[source]).to(PLACES[target], memory_format=memory_format)
        assert_same(moved, plain)
        assert moved.stride() == plain.to(memory_format=memory_format).stride()


def test_large_copies_both_ways():
    plain = torch.arange(3_000_001, dtype=torch.float32)
    there = plain.to(COMPUTE).to(OFFLOAD)
    assert_same(there, plain)
    assert_same(there[1:].to(COMPUTE), plain[1:])
    assert_same(there[::3].to(COMPUTE), plain[::3])


def test_numpy():
    t = numbers((3, 4), torch.float32).to(OFFLOAD)
    assert t.cpu().numpy().tolist() == numbers((3, 4), torch.float32).tolist()
    assert t.tolist() == numbers((3, 4), torch.float32).tolist()
    assert_same(torch.from_numpy(t.cpu().numpy()).to("offload"), t)


@pytest.mark.parametrize(("source", "target"), [(OFFLOAD, CPU), (CPU, OFFLOAD), (OFFLOAD, OFFLOAD), (COMPUTE, OFFLOAD)])
def test_shapes_of_empty_targets_count(source, target):
    empty = torch.empty(3, 0, device=target)
    with pytest.raises(RuntimeError, match=r"\[3, 2\].*\[3, 0\]|must match"):
        empty.copy_(torch.ones(3, 2, device=source))
    assert empty.copy_(torch.ones(3, 1, device=source)).shape == (3, 0)
