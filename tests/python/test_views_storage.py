"""Views share memory; resize_, set_ and storages do what they do on the CPU."""

import gc

import pytest
import torch
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same, at, data, same

VIEWS = {
    "view": lambda t: t.view(4, 12),
    "view of a dtype": lambda t: t.view(torch.int32),
    "reshape": lambda t: t.reshape(2, 24),
    "flatten": lambda t: t.flatten(),
    "transpose": lambda t: t.t(),
    "permute": lambda t: t.view(2, 3, 8).permute(2, 0, 1),
    "slice": lambda t: t[1:5, ::2],
    "select": lambda t: t[2],
    "narrow": lambda t: t.narrow(1, 2, 3),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.unsqueeze(0).squeeze(),
    "expand": lambda t: t[:1].expand(3, 8),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(1, 3, 2),
    "as_strided": lambda t: t.as_strided((3, 2), (8, 3), 1),
    "chunk": lambda t: t.chunk(2)[1],
    "split": lambda t: t.split([2, 4])[1],
    "unbind": lambda t: t.unbind(1)[3],
    "tensor_split": lambda t: t.tensor_split(4)[2],
    "movedim": lambda t: t.movedim(0, 1),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(6, 4, 2)),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "alias": lambda t: torch.ops.aten.alias(t),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "unflatten": lambda t: t.unflatten(1, (2, 4)),
    "view_as": lambda t: t.view_as(torch.empty(12, 4)),
    "hsplit": lambda t: t.hsplit(2)[1],
    "mT": lambda t: t.mT,
    "ellipsis": lambda t: t[..., None, 1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_view(name):
    plain = torch.arange(48.0).view(6, 8)
    there = plain.clone().to(OFFLOAD)
    expected, view = VIEWS[name](plain), VIEWS[name](there)
    assert view.device.type == "offload"
    assert view.stride() == expected.stride()
    assert view.storage_offset() == expected.storage_offset()
    assert view.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    assert view.data_ptr() == there.data_ptr() + expected.data_ptr() - plain.data_ptr()
    assert view._is_view() == expected._is_view()
    assert_same(view, expected)
    assert_same(view.to(COMPUTE), expected)
    if name != "expand":
        view.fill_(7)
        expected.fill_(7)
        assert_same(there, plain)
    if name != "data" and name != "detach":
        assert there._version == plain._version


@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("view of a dtype", "detach", "data", "alias")])
def test_gradient_through_a_view(name):
    results = []
    for device in (COMPUTE, OFFLOAD):
        base = torch.arange(48.0).view(6, 8).to(device).requires_grad_()
        view = VIEWS[name](base)
        weight = torch.arange(float(view.numel())).view(view.shape).to(COMPUTE)
        y = (view * weight).sum()
        (y.abs() if y.is_complex() else y).backward()
        assert base.grad.device == base.device
        results.append(base.grad)
    assert_same(results[1], results[0])


def test_views_of_views_see_each_others_writes():
    base = torch.zeros(6, 8, device=OFFLOAD)
    a = base[1:5]
    b = a.t()[2:4]
    b.add_(1)
    a[0].mul_(5)
    base[:, 3] += torch.arange(6.0, device=COMPUTE)
    plain = torch.zeros(6, 8)
    plain[1:5].t()[2:4].add_(1)
    plain[1].mul_(5)
    plain[:, 3] += torch.arange(6.0)
    assert_same(base, plain)
    assert_same(a, plain[1:5])
    assert_same(b, plain[1:5].t()[2:4])
    assert base._version == a._version == b._version


def test_base_and_memory():
    base = torch.arange(10.0, device=OFFLOAD)
    view = base[3:]
    assert view._base is base
    address = view.data_ptr()
    del base
    gc.collect()
    assert view.data_ptr() == address
    assert_same(view, torch.arange(3.0, 10.0))


def test_host_memory_is_counted_and_given_back():
    gc.collect()
    before = torch.offload.memory_allocated()
    big = torch.empty(1 << 20, dtype=torch.uint8, device=OFFLOAD)
    view = big[5:]
    assert torch.offload.memory_allocated() - before >= 1 << 20
    assert torch.offload.memory_allocated() - before <= (1 << 20) * 1.03
    del big
    assert torch.offload.memory_allocated() - before >= 1 << 20
    del view
    assert torch.offload.memory_allocated() == before


@pytest.mark.parametrize("shape", [(2, 3), (5, 4), (40,), (0,), ()], ids=str)
def test_resize(shape):
    for start in (torch.arange(12.0).view(3, 4), torch.empty(0), torch.arange(12.0).view(3, 4).t()):
        plain, there = start.clone(), start.clone().to(OFFLOAD)
        plain.resize_(shape)
        there.resize_(shape)
        assert there.shape == plain.shape
        assert there.stride() == plain.stride()
        known = min(plain.numel(), start.numel())
        assert_same(there.flatten()[:known], plain.flatten()[:known])
        there.fill_(3)
        assert_same(there, plain.fill_(3))


def test_resize_is_seen_by_views():
    base = torch.arange(4.0, device=OFFLOAD)
    other = base.view(2, 2)
    base.resize_(100)
    base[0] = 9
    assert other[0, 0].item() == 9


def test_resize_to_channels_last_and_resize_as():
    there = torch.empty(0, device=OFFLOAD).resize_(1, 2, 3, 4, memory_format=torch.channels_last)
    assert there.is_contiguous(memory_format=torch.channels_last)
    there.resize_as_(torch.empty(2, 5))
    assert there.shape == (2, 5)


def test_resize_needs_a_gradient_is_refused_as_on_the_cpu():
    for device in (CPU, OFFLOAD):
        with pytest.raises(RuntimeError, match=r"requires grad|that require grad"):
            torch.ones(3, device=device, requires_grad=True).resize_(4)


def test_set():
    source = torch.arange(12.0, device=OFFLOAD)
    target = torch.empty(0, device=OFFLOAD)
    target.set_(source)
    assert target.data_ptr() == source.data_ptr()
    target.set_(source.untyped_storage(), 2, (2, 3), (4, 1))
    assert_same(target, torch.arange(12.0).as_strided((2, 3), (4, 1), 2))
    target[0, 0] = 50
    assert source[2].item() == 50
    target.set_(source.untyped_storage())
    assert target.shape == (12,)
    target.set_()
    assert target.shape == (0,)
    with pytest.raises(RuntimeError, match="device"):
        target.set_(torch.ones(3))
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(3).set_(source)


@pytest.mark.parametrize("device", [CPU, OFFLOAD], ids=str)
@pytest.mark.parametrize(
    ("offset", "sizes", "strides"),
    [(-1, (2,), (1,)), (2, (2,), (-1,)), (2**62, (3,), (1,)), (0, (2**40, 2**40), (2**40, 1)), (0, (3,), (2**62,))],
)
def test_set_out_of_reach_is_refused(device, offset, sizes, strides):
    storage = torch.arange(4.0, device=device).untyped_storage()
    target = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match=r"storage offset|strides|overflow"):
        target.set_(storage, offset, sizes, strides)
    assert storage.nbytes() == 16
    if device == OFFLOAD:
        assert_same(target, torch.ones(2))


def test_data_assignment():
    parameter = torch.nn.Parameter(torch.ones(3, device=OFFLOAD))
    parameter.data = torch.arange(4.0, device=OFFLOAD)
    assert_same(parameter.data, torch.arange(4.0))
    parameter.data = torch.arange(2.0)
    assert parameter.device == CPU
    parameter.data = torch.arange(2.0, device=OFFLOAD)
    assert parameter.device.type == "offload"
    parameter.data = parameter.data.to(COMPUTE)
    assert parameter.device == COMPUTE


def test_swap_tensors():
    a, b = torch.ones(3, device=OFFLOAD), torch.zeros(2)
    torch.utils.swap_tensors(a, b)
    assert a.device == CPU
    assert b.device.type == "offload"
    assert_same(b, torch.ones(3))


def test_untyped_storage():
    tensor = torch.arange(6, dtype=torch.int16, device=OFFLOAD)[2:]
    storage = tensor.untyped_storage()
    assert storage.nbytes() == 12
    assert storage.device == torch.device("offload:0")
    assert storage.data_ptr() == tensor.data_ptr() - 4
    assert storage.data_ptr() % 64 == 0
    assert storage.cpu().tolist() == torch.arange(6, dtype=torch.int16).untyped_storage().tolist()
    assert storage.tolist() == storage.cpu().tolist()
    assert storage.clone().device == storage.device
    assert storage.clone().data_ptr() != storage.data_ptr()
    assert torch.tensor([], dtype=torch.int16, device=OFFLOAD).set_(storage.clone()).tolist() == list(range(6))


def test_storage_resize():
    tensor = torch.arange(6.0, device=OFFLOAD)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert storage.size() == 0
    storage.resize_(24)
    assert storage.size() == 24
    tensor.copy_(torch.arange(6.0))
    assert_same(tensor, torch.arange(6.0))
    storage.resize_(48)
    assert_same(tensor, torch.arange(6.0))


def test_storage_freed_and_filled_as_fsdp_does():
    weight = torch.nn.Parameter(torch.arange(16.0, device=OFFLOAD).view(4, 4))
    kept = weight.detach().cpu()
    x = torch.ones(2, 4, device=COMPUTE)
    expected = torch.nn.functional.linear(x, weight)
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(64)
    with torch.no_grad():
        weight.copy_(kept)
    assert_same(torch.nn.functional.linear(x, weight), expected)


@pytest.mark.parametrize("source", [CPU, COMPUTE, OFFLOAD], ids=str)
def test_storages_move(source):
    storage = torch.arange(4.0, device=source).untyped_storage()
    moved = storage.to(device=OFFLOAD)
    assert moved.device.type == "offload"
    assert moved.tolist() == storage.cpu().tolist()
    assert moved.to(device=source).tolist() == moved.tolist()
    made = torch.UntypedStorage(16, device="offload")
    made.copy_(storage)
    assert made.tolist() == storage.tolist()


def test_data_ptr_never_throws():
    assert torch.empty(0, device=OFFLOAD).data_ptr() == 0
    tensor = torch.ones(3, device=OFFLOAD)
    assert tensor.data_ptr() == tensor.data_ptr() != 0
    computed = tensor * 2
    assert computed.data_ptr() == computed.data_ptr()


def test_writes_through_one_alias_are_fetched_by_the_other():
    """A cached copy of one view must not outlive a write through another."""
    base = torch.zeros(8, 8, device=OFFLOAD)
    x = torch.ones(2, 4, device=COMPUTE)
    for k in range(1, 5):
        assert_same(x @ base[:4], torch.full((2, 8), 4.0 * (k - 1)))
        base.t()[2:].add_(1)
        base[:, :2] += 1
        assert_same(x @ base[:4], torch.full((2, 8), 4.0 * k))
        assert_same(x @ base[2:6], torch.full((2, 8), 4.0 * k))


@pytest.mark.parametrize("offset", [2, 30, 502])
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_an_offset_into_the_storage(offset, feed):
    """What counts from the beginning of a storage, and not of the tensor, reads what is not the tensor's."""

    def run(device):
        weight = at("cpu", 1000).to(device).requires_grad_()
        part, values = weight[500:540], data(3).to(device if feed == "offload" else COMPUTE)
        copy = torch.as_strided_copy(part, (3,), (1,), offset)
        scattered = torch.as_strided_scatter(part.detach(), values, (3,), (1,), offset)
        (copy * values).sum().backward()
        return copy, scattered, weight.grad

    same(run)


@pytest.mark.parametrize("size", [2, 1000])
@pytest.mark.parametrize(
    "write",
    [
        lambda a, b: a.add_(b.conj()),
        lambda a, b: a.mul_(b.conj().imag),
        lambda a, b: a.addcmul_(b.conj(), b, value=2),
        lambda a, b: torch._foreach_add_([a], [b.conj()]),
        lambda a, b: torch.add(b.conj(), b, out=a),
        lambda a, b: a.real.add_(torch._neg_view(b.imag)),
    ],
    ids=["add", "mul", "addcmul", "foreach", "out", "neg"],
)
def test_a_write_reads_what_is_conjugate(write, size):
    """PyTorch gives the operation a resolved copy of it, which nobody else holds."""

    def run(device):
        a, b = torch.randn(2, size, dtype=torch.complex64).unbind()
        a, b = a.to(device), b.to(device)
        write(a, b)
        return a, b

    same(run, truth=CPU)


def test_gradients_that_are_conjugate():
    def run(device):
        x = torch.randn(33).to(device).requires_grad_()
        y = torch.fft.fft(x)
        (y * y.conj()).real.sum().backward()
        return x.grad

    same(run)


@pytest.mark.skipif(GPU, reason="CUDA's kernel does all of a list at once, in no order")
def test_a_list_that_names_a_tensor_twice():
    def run(device):
        x = torch.arange(3.0).to(device)
        torch._foreach_add_([x, x], [torch.ones(3, device=COMPUTE)] * 2)
        return x

    same(run, truth=CPU)


@pytest.mark.skipif(GPU, reason="CUDA's kernel does all of a list at once, in no order")
@pytest.mark.parametrize("born", ["host", "device"])
def test_a_list_that_reads_what_it_writes(born):
    def run(device):
        x, y = at(device, 4), at(device, 4, seed=1)
        if born == "device":
            x, y = x * 1, y * 1
        torch._foreach_mul_([x, x], [x, x])
        torch._foreach_mul_([x, y], [y, x])
        one = x.sum()
        return x, y, one.fill_(one)

    same(run, truth=CPU)


OVERLAPPING = {
    "lerp_": lambda x: x.unfold(0, 2, 1)[:2].lerp_(torch.ones(2, 2), 0.5),
    "index_add_": lambda x: x.unfold(0, 2, 1)[:2].index_add_(0, torch.tensor([0, 1]), torch.ones(2, 2).to(x.device)),
    "add_": lambda x: x.as_strided((2, 2), (1, 1), 1).add_(torch.ones(2, 2)),
    "add_, expanded": lambda x: x.as_strided((2, 2), (1, 1)).unsqueeze(0).expand(1, 2, 2).add_(torch.ones(2, 2)),
    "foreach": lambda x: torch._foreach_add_([x.unfold(0, 2, 1)], [torch.ones(3, 2)]),
    "out": lambda x: torch.add(torch.ones(3, 2), 1, out=x.unfold(0, 2, 1)),
}


@pytest.mark.skipif(GPU, reason="there CUDA's tensors take the CPU's part, and write in no order")
@pytest.mark.parametrize("grad", [True, False], ids=["grad mode", "no_grad"])
@pytest.mark.parametrize("born", ["host", "device"])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_views_that_overlap_themselves_beside_plain_tensors(name, born, grad):
    def run(device):
        x = at(device, 4) * 1 if born == "device" else at(device, 4)
        with torch.set_grad_enabled(grad):
            OVERLAPPING[name](x)
        return x

    same(run, truth=CPU)


@pytest.mark.parametrize("born", ["host", "device"])
def test_writes_to_an_expanded_tensor(born):
    def run(device):
        one = torch.arange(3.0).reshape(3, 1).to(device)
        one = one * 2 if born == "device" else one
        wide = one.expand(3, 4)
        wide[1:].fill_(7)
        filled = one.clone()
        with pytest.raises(
            RuntimeError, match="more than one element of the written-to tensor refers to a single memory"
        ):
            wide.add_(torch.ones(3, 4, device=COMPUTE))
        wide.zero_()
        return filled, one

    same(run)


@pytest.mark.parametrize("operand", [COMPUTE, OFFLOAD], ids=str)
def test_out_gets_the_strides_of_the_result(operand):
    x = data(2, 3, 4, 5, device=operand).to(memory_format=torch.channels_last)
    out = torch.empty(0, device=OFFLOAD)
    torch.mul(x, 2, out=out)
    assert out.stride() == x.stride()
    assert_same(out, x * 2)


def test_a_resize_to_the_same_size_keeps_the_strides():
    def run(device):
        transposed = data(2, 3, device=device).t()
        expanded = data(3, device=device).expand(4, 3)
        transposed.resize_(3, 2)
        expanded.resize_as_(torch.empty(4, 3, device=device))
        restrided = data(1, 2, 3, 4, device=device).resize_(1, 2, 3, 4, memory_format=torch.channels_last)
        return [(t, t.stride(), t.untyped_storage().nbytes()) for t in (transposed, expanded)], restrided.stride()

    same(run)


@pytest.mark.parametrize("equation", ["ii->i", "ij->ji", "ij", "ij->i", "...j->j..."])
def test_a_contraction_of_one_tensor_is_a_view_where_it_is_one_elsewhere(equation):
    def run(device):
        a = data(4, 4, device=device).requires_grad_()
        result = torch.einsum(equation, a)
        result.sum().backward()
        with torch.no_grad():
            torch.einsum(equation, a).zero_()
        return result.stride(), result._is_view(), a, a.grad

    same(run)


def factors(a):
    """Of the CPU, wherever they are solved with."""
    return tuple(t.to(a.device) for t in torch.linalg.lu_factor(a.cpu()))


SOLVERS = {
    "solve": lambda a, b, left, out, info: torch.linalg.solve(a, b, left=left, out=out),
    "solve_ex": lambda a, b, left, out, info: torch.linalg.solve_ex(a, b, left=left, out=(out, info)),
    "lu_solve": lambda a, b, left, out, info: torch.linalg.lu_solve(*factors(a), b, left=left, out=out),
}


@pytest.mark.parametrize("born", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_result_that_is_written_as_its_conjugate(solver, left, dtype, born):
    """Of complex equations from the right PyTorch solves others, and says of ``out=`` that its bytes are the conjugate."""

    def solution(device):
        a, b = at(device, 4, 4, dtype=dtype, seed=1), at(device, 4, 4, dtype=dtype, seed=2)
        out, info = torch.zeros(4, 4, dtype=dtype, device=device), torch.zeros((), dtype=torch.int32, device=device)
        if born == "device":
            out, info = out * 1, info * 1
        SOLVERS[solver](a, b, left, out, info)
        return out

    actual = solution(OFFLOAD)
    truth = solution(COMPUTE if born == "device" else CPU)
    assert actual.is_offload
    assert_same(actual, truth)
    assert_same(actual.mH.clone(), truth.mH.clone())
