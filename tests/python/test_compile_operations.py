"""The operations of compiled graphs, and what is made of those on offload tensors alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, GPU, OFFLOAD, SIM, assert_same, at, data, deterministic
from torch._inductor import config as inductor_config

from torch_offload.compile.fakes import code_of


@pytest.mark.parametrize("grad", [False, True], ids=["value", "differentiable"])
@pytest.mark.parametrize("name", ["fetch", "stash", "copy", "give", "write_"])
def test_opcheck(name, grad):
    if grad and name in ("give", "write_"):
        pytest.skip("graphs call it, below autograd")
    offload, plain = at(OFFLOAD, 4, 3).requires_grad_(grad), data(4, 3).requires_grad_(grad)
    target = torch.device("cpu:0") if SIM else COMPUTE
    arguments = {
        "fetch": (offload, target),
        "stash": (plain, OFFLOAD),
        "copy": (offload, OFFLOAD),
        "give": (plain, OFFLOAD),
        "write_": (offload, plain),
    }[name]
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    # PyTorch has that one for operands on the CPU, CUDA and XPU.
    tests += [] if grad and name in ("fetch", "copy") else ["test_autograd_registration"]
    op = getattr(torch.ops.offload, "stash" if name == "copy" else name).default
    torch.library.opcheck(op, arguments, test_utils=tests)


def test_an_aligned_fetch_of_what_is_not():
    memory = at(OFFLOAD, 8, 9)
    target = torch.device("cpu:0") if SIM else COMPUTE
    for source in (memory, memory[1], memory[1:, 1], memory.t()[3:, 2:], memory[3].expand(4, 9), memory[1, :0]):
        fetched = torch.ops.offload.fetch.coded(source, *code_of(target), 16)
        assert fetched.data_ptr() % 16 == 0
        assert fetched.stride() == source.stride()
        assert_same(fetched, source)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.t(), lambda t: t[:, ::2]], ids=["rows", "columns", "gaps"])
def test_opcheck_of_an_aligned_fetch(layout, alignment):
    """Without derivatives: inductor calls it, below autograd."""
    source, target = layout(at(OFFLOAD, 4, 6)), torch.device("cpu:0") if SIM else COMPUTE
    torch.library.opcheck(torch.ops.offload.fetch.coded, (source, *code_of(target), alignment))


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
def test_opcheck_of_a_lookup(shape):
    table, index = at(OFFLOAD, 7, 3, 2), torch.full(shape, -4, device=COMPUTE)
    torch.library.opcheck(torch.ops.offload.look_up, (table, index))
    assert_same(torch.ops.offload.look_up(table, index), at(COMPUTE, 7, 3, 2)[index])
    permuted = table.transpose(1, 2)
    torch.library.opcheck(torch.ops.offload.look_up, (permuted, index))
    assert_same(torch.ops.offload.look_up(permuted, index), at(COMPUTE, 7, 3, 2).transpose(1, 2)[index].contiguous())
    with pytest.raises(RuntimeError, match="was given one on"):
        torch.ops.offload.look_up(table.to(COMPUTE), index)
    with pytest.raises(IndexError):
        torch.ops.offload.look_up(at(OFFLOAD, 1)[0], index)


def test_opcheck_of_stashes_in_generated_code():
    for op in (torch.ops.offload.stash.coded, torch.ops.offload.give.coded):
        torch.library.opcheck(op, (data(4, 3), 0))
        result = op(data(4, 3), 0)
        assert result.device == torch.device("offload", 0)
        assert_same(result, data(4, 3))


@pytest.mark.parametrize("name", ["fetch", "look_up", "stash", "give", "write_"])
def test_tags(name):
    """A graph may hold them, and one that inductor captures leaves them out where this package doesn't know better."""
    packet = getattr(torch.ops.offload, name)
    for overload in packet.overloads():
        tags = set(getattr(packet, overload).tags)
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe} <= tags, overload


@pytest.mark.parametrize("place", [COMPUTE, OFFLOAD], ids=["beside", "alone"])
def test_generated_code_may_be_cpp(place):
    """It names devices by numbers, as the C++ that inductor generates does not compile where an operation takes a device."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).to(COMPUTE)
    model, total = copy.deepcopy(plain).to(OFFLOAD), torch.zeros(4, device=OFFLOAD)
    found = []
    with inductor_config.patch(cpp_wrapper=True):
        for each, device in ((plain, COMPUTE), (model, place)):
            step = compiled(each, "inductor")
            y = step(data(3, 8).to(device))
            assert y.device.type == device.type
            y.square().sum().backward()
            with torch.no_grad():
                found.append([y.detach(), step(data(3, 8).to(device)), [value.grad for value in each.parameters()]])
        compiled(lambda x: total.add_(x), "inductor")(data(4))
    assert_same(found[1], found[0])
    assert_same(total, data(4))


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "gaps": lambda t: t[:, ::2],
    "a part": lambda t: t[1:3],
    "transposed with gaps": lambda t: t[::2, ::3].t(),
    "expanded": lambda t: t[:, :1].expand(4, 5),
    "expanded scalar": lambda t: t.new_ones(()).expand(4, 5),
    "channels last": lambda t: t.reshape(1, 2, 2, 6).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", ["fetch", "stash", "give"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_opcheck_of_layouts(name, layout):
    source, target = (OFFLOAD, torch.device("cpu:0") if SIM else COMPUTE) if name == "fetch" else (COMPUTE, OFFLOAD)
    if name == "fetch" and layout is LAYOUTS["a part"]:
        pytest.skip("where its storage begins is the cache's choice")
    value, op = layout(at(source, 4, 6)), getattr(torch.ops.offload, name).default
    torch.library.opcheck(op, (value, target), test_utils=["test_schema", "test_faketensor"])
    assert_same(op(value, target), value)


def test_stash_of_what_is_on_offload_is_a_copy():
    source = at(OFFLOAD, 3).requires_grad_()
    copy = torch.ops.offload.stash(source, OFFLOAD)
    assert copy.data_ptr() != source.data_ptr()
    (copy * copy).sum().backward()
    assert_same(source.grad, source.detach() + source.detach())
    with torch.no_grad():
        source.zero_()
    assert_same(copy.detach(), at("cpu", 3))


def test_a_launch_of_triton_is_refused():
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    from torch_offload.compile.on_device import OnDevice

    graph = torch.fx.Graph()
    operand = graph.placeholder("weight")
    operand.meta["val"] = at(OFFLOAD, 4)
    graph.output(graph.call_function(triton_kernel_wrapper_mutation, (), {"kwargs": {"source": operand}}))
    with pytest.raises(NotImplementedError, match="a Triton kernel is called with an offload tensor"):
        OnDevice()(torch.fx.GraphModule(torch.nn.Module(), graph))


def attention(w):
    q = w.view(1, 4, 2, 3).transpose(1, 2)
    q = q * 2 + torch.cat((-q[..., 1:], q[..., :1]), -1)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(4, 6)


OPERATIONS = {
    "attention": attention,
    "contiguous": lambda w: w.t().contiguous() + 1,
    "flatten": lambda w: w.t().flatten() + 1,
    "reshape": lambda w: w.t().reshape(3, 8) + 1,
    "view of another dtype": lambda w: w.view(torch.int32) + 1,
    "unfold": lambda w: w.unfold(1, 3, 2) + 1,
    "parts": lambda w: sum(w.split(2, 1)) + w.chunk(3, 1)[1],
    "as_strided": lambda w: w[1:].as_strided((3, 3), (2, 1), 7) * 2,
    "itself and a view": lambda w: (w, w.t(), w[1] + 1),
    "padded": lambda w: F.pad(w, (1, 1)),
    "made anew": lambda w: (torch.zeros_like(w) + 1, w.new_full((2,), 3.0), torch.arange(6, device=w.device)),
    "sorted": lambda w: w.sort(1),
    "taken": lambda w: w.gather(1, (w > 0).long()) + w[:, [0, 2, 4, 1, 3, 5]],
    "imaginary part": lambda w: torch.complex(w, w + 1).conj().imag.sin(),
    "sum": lambda w: w.sum().square(),
    "mean": lambda w: torch.var_mean(w, 1),
}


@pytest.mark.filterwarnings("error:Attempted to insert a get_attr")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operations_on_offload_alone(operation, backend):
    weight, plain = at(OFFLOAD, 4, 6).requires_grad_(), at(COMPUTE, 4, 6).requires_grad_()
    results, expected = compiled(operation, backend)(weight), operation(plain)
    several = isinstance(expected, tuple)
    results, expected = (tuple(results), tuple(expected)) if several else ((results,), (expected,))
    for result, value in zip(results, expected, strict=True):
        assert result.device.type == "offload"
        assert result.stride() == value.stride()
        torch.testing.assert_close(result.detach().cpu(), value.detach().cpu())
    if expected[0].requires_grad:
        results[0].square().sum().backward(), expected[0].square().sum().backward()
        assert weight.grad.device.type == "offload"
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if GPU else {}  # sums of inductor's kernels are in their own order
        torch.testing.assert_close(weight.grad.cpu(), plain.grad.cpu(), **tolerance)


SEVERAL_USES = {
    "two products": lambda x, w: (x @ w).tanh() @ w,
    "three": lambda x, w: ((x @ w).tanh() @ w).tanh() @ w.t(),
    "a product and a sum": lambda x, w: (x @ w + w[0]).tanh(),
    "twice the same": lambda x, w: x @ (w + w),
    "two views": lambda x, w: torch.cat([x[:, :4] @ w[:4], x[:, :4] @ w[4:]]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SEVERAL_USES)
def test_gradients_of_a_weight_that_is_used_several_times(name, backend):
    """They are added up where they are made, as part of the product that makes the last where the compiler knows that."""

    def gradient(device):
        w = at(device, 8, 8, seed=1).requires_grad_()
        x = data(16, 8).requires_grad_()
        compiled(SEVERAL_USES[name], backend)(x, w).square().sum().backward()
        return x.grad, w.grad.to(COMPUTE)

    with deterministic():
        expected = gradient(COMPUTE)
        torch.compiler.reset()
        assert_same(gradient(OFFLOAD), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_autograd_takes_a_compiled_backward(backend):
    from torch._dynamo import compiled_autograd, utils

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).to(COMPUTE)
    found = []
    for model in (plain, copy.deepcopy(plain).to(OFFLOAD)):
        torch.compiler.reset()
        utils.counters.clear()
        loss = compiled(model, backend)(data(3, 8)).square().sum()
        with compiled_autograd._enable(torch.compile(backend=backend)):
            loss.backward()
        assert utils.counters["compiled_autograd"]["captures"] == 1
        assert {value.grad.device.type for value in model.parameters()} == {model[0].weight.device.type}
        found.append([value.grad.cpu() for value in model.parameters()])
    if backend == "inductor" and GPU:
        # Compiled autograd has the sums in another order among the products, and inductor's kernels on CUDA another last bit.
        torch.testing.assert_close(found[1], found[0])
    else:
        assert_same(found[1], found[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_beside_a_tensor_of_offload_tensors_alone(backend):
    def run(device):
        torch.compiler.reset()
        gradients = [at(device, 4), at(device, 3, seed=1)]
        found, scale = torch.zeros(1, device=device), torch.full((1,), 0.5, device=device)

        def f(x):
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)
            return x + gradients[0]

        return compiled(f, backend)(at(COMPUTE, 4, seed=2)), gradients, found

    assert_same(run(OFFLOAD), run(COMPUTE))


@torch.no_grad()
@pytest.mark.parametrize("feed", [COMPUTE, OFFLOAD], ids=["plain", "offload"])
def test_a_frozen_convolution_whose_result_is_laid_out_anew(feed):
    """Inductor has it computed with channels last, and makes a reshape of the view behind it, which is a copy then."""

    def run(device):
        torch.compiler.reset()
        torch.manual_seed(0)
        net = torch.nn.Conv2d(3, 6, 3).to(device).eval()
        x = at(device if feed is OFFLOAD else COMPUTE, 2, 3, 4, 4)
        with inductor_config.patch(freezing=True):
            return compiled(lambda x: net(x).flatten(1) + 1, "inductor")(x).to(COMPUTE)

    torch.testing.assert_close(run(OFFLOAD), run(COMPUTE))
