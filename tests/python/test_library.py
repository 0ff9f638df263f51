"""Operations of other libraries, defined before or after the first offload tensor, are served like PyTorch's own."""

import copy

import pytest
import torch
from helpers import COMPUTE, CPU, OFFLOAD, assert_same, at, deterministic, passes

import torch_offload

SPACES = iter(f"offload_test_{k}" for k in range(100))
USED = torch.ones(1, device=OFFLOAD)  # from now on the package is in use


@pytest.fixture
def library():
    library = torch.library.Library(next(SPACES), "DEF")
    yield library
    library._destroy()  # a library that is just dropped leaves names behind, at which inductor stumbles


def numbers():
    return torch.arange(1.0, 5.0).to(COMPUTE), torch.full((4,), 2.0)


def test_without_a_kernel(library):
    library.define("nothing(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match=f"{library.ns}::nothing"):
        getattr(torch.ops, library.ns).nothing(torch.ones(2, device=OFFLOAD))


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
@pytest.mark.parametrize("inference", [False, True])
def test_kernels(library, key, inference):
    """Whatever the key that its kernel stands on, the operation gets operands of one device."""

    def scale(x, w):
        return x * 2 + w

    library.define("scale(Tensor x, Tensor w) -> Tensor")
    library.impl("scale", scale, key)
    if key == "CPU":
        library.impl("scale", scale, "CUDA")
    operation = getattr(torch.ops, library.ns).scale
    x, w = numbers()
    with torch.inference_mode(inference):
        mixed, alone = operation(x, w.to(OFFLOAD)), operation(x.to(OFFLOAD), w.to(OFFLOAD))
    assert (mixed.device, alone.device.type) == (COMPUTE, "offload")
    assert_same((mixed, alone), (2 * x + 2, 2 * x + 2))


@pytest.mark.parametrize("late", [False, True])
def test_a_devices_kernel_comes_before_a_composite_one(library, late):
    """Whichever is there first: what is computed on a device is computed by its kernel."""
    ran = []

    def kernel(name):
        return lambda x, w: (ran.append(name), x * w)[1]

    library.define("scale(Tensor x, Tensor w) -> Tensor")
    kernels = [("composite", "CompositeExplicitAutograd"), ("device", "CPU"), ("device", "CUDA")]
    for name, key in kernels[::-1] if late else kernels:
        library.impl("scale", kernel(name), key)
    operation = getattr(torch.ops, library.ns).scale
    x, w = numbers()
    for operands in ((x, w.to(OFFLOAD)), (x.to(OFFLOAD), w.to(OFFLOAD)), (x, w.to(COMPUTE))):
        assert_same(operation(*operands), x * 2)
    with torch_offload.on_host():
        assert_same(operation(x.to(OFFLOAD), w.to(OFFLOAD)), x * 2)
    assert ran == ["device"] * 4


def test_a_devices_kernel_comes_first_where_the_library_did():
    """With both kernels of it before the first offload tensor."""
    passes(
        """
        import torch
        library = torch.library.Library("offload_test_early", "DEF")
        library.define("device(Tensor x, Tensor w) -> int")
        library.impl("device", lambda x, w: 0, "CompositeExplicitAutograd")
        for key in ("CPU", "CUDA"):
            library.impl("device", lambda x, w: 1, key)
        import torch_offload
        x = torch.ones(2, device="cuda" if torch.cuda.is_available() else "cpu")
        w = x.to("offload")
        operation = torch.ops.offload_test_early.device
        assert [operation(x, w), operation(w, w), operation(x, x)] == [1, 1, 1]
        """
    )


def test_an_in_place_operation(library):
    library.define("add_to(Tensor(a!) x, Tensor w) -> ()")
    library.impl("add_to", lambda x, w: (x.add_(w), None)[1], "CompositeExplicitAutograd")
    x, w = numbers()
    target, other = x.clone(), x.to(OFFLOAD)
    getattr(torch.ops, library.ns).add_to(target, w.to(OFFLOAD))
    getattr(torch.ops, library.ns).add_to(other, w.to(OFFLOAD))
    assert_same((target, other), (x + 2, x + 2))


def custom(name, seen):
    @torch.library.custom_op(name, mutates_args=())
    def scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append((x.device, w.device))
        return x * w

    return scale


def give_gradients(scale):
    scale.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_gradients(feed):
    seen = []
    scale = custom(f"{next(SPACES)}::scale", seen)
    give_gradients(scale)
    x, w = numbers()
    x = x.to(COMPUTE if feed == "plain" else OFFLOAD).requires_grad_()
    w = w.to(OFFLOAD).requires_grad_()
    y = scale(x, w)
    y.sum().backward()
    assert all(a == b and a.type == COMPUTE.type for a, b in seen)
    assert (y.device, x.grad.device, w.grad.device.type) == (x.device, x.device, "offload")
    assert_same((y, x.grad, w.grad), (x * 2, torch.full((4,), 2.0), x))


def written_by_a_decorator(library, seen):
    """A scaled product that the device alone has a kernel for, and so is what its derivative is made of."""

    @torch.library.custom_op(f"{library.ns}::product", mutates_args=(), device_types=COMPUTE.type)
    def product(x: torch.Tensor, w: torch.Tensor, by: float) -> torch.Tensor:
        seen.append((x.device, w.device))
        return x @ w.t() * by

    @torch.library.custom_op(f"{library.ns}::gradients", mutates_args=(), device_types=COMPUTE.type)
    def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, by: float) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((g.device, x.device, w.device))
        return g @ w * by, g.t() @ x * by

    product.register_autograd(lambda ctx, g: (*gradients(g, *ctx.saved_tensors, ctx.by), None), setup_context=keep)
    return product


def written_by_hand(library, seen):
    """The same, kernel by kernel."""
    library.define("product(Tensor x, Tensor w, float by) -> Tensor")
    library.define("gradients(Tensor g, Tensor x, Tensor w, float by) -> (Tensor, Tensor)")

    def product(x, w, by):
        seen.append((x.device, w.device))
        return x @ w.t() * by

    def gradients(g, x, w, by):
        seen.append((g.device, x.device, w.device))
        return g @ w * by, g.t() @ x * by

    library.impl("product", product, COMPUTE.type.upper())
    library.impl("gradients", gradients, COMPUTE.type.upper())
    operations = getattr(torch.ops, library.ns)
    torch.library.register_autograd(
        f"{library.ns}::product",
        lambda ctx, g: (*operations.gradients(g, *ctx.saved_tensors, ctx.by), None),
        setup_context=keep,
        lib=library,
    )
    return operations.product


def keep(ctx, inputs, output):
    *tensors, ctx.by = inputs
    ctx.save_for_backward(*tensors)


class Products(torch.nn.Module):
    """Two layers with an operation of somebody's, and one weight that both use."""

    def __init__(self, product):
        super().__init__()
        self.weights = torch.nn.ParameterList(at(CPU, 8, 8, seed=k) / 4 for k in range(2))
        self.product = product

    def forward(self, x):
        for weight in (*self.weights, self.weights[0]):
            x = self.product(x, weight, 0.5).tanh()
        return x


@pytest.mark.parametrize("write", [written_by_a_decorator, written_by_hand])
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_gradients_of_what_the_device_alone_knows(library, write, feed):
    """Its kernels get operands of the device, forward and backward, and all values are those of the plain model."""
    seen = []
    net = Products(write(library, seen))
    results = []
    with deterministic():
        for device, fed in ((COMPUTE, COMPUTE), (OFFLOAD, COMPUTE if feed == "plain" else OFFLOAD)):
            model = copy.copy(net)
            model.weights = copy.deepcopy(net.weights).to(device)
            x = at(fed, 5, 8, seed=9).requires_grad_()
            for _ in range(2):  # gradients are added to
                y = model(x)
                y.square().sum().backward()
            assert (y.device.type, x.grad.device.type) == (fed.type, fed.type)
            assert {weight.grad.device.type for weight in model.weights} == {device.type}
            results.append((y, x.grad, [weight.grad for weight in model.weights]))
    assert len(seen) == 2 * 2 * 2 * 3
    assert {device for call in seen for device in call} == {COMPUTE}
    assert_same(results[1], results[0])


def test_gradients_of_what_was_there_before_the_package():
    passes(
        """
        import torch
        device = "cuda" if torch.cuda.is_available() else "cpu"

        @torch.library.custom_op("offload_test_before::square", mutates_args=(), device_types=device)
        def square(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            assert x.device.type == w.device.type == device
            return x * w * w

        square.register_autograd(
            lambda ctx, g: (None, 2 * g * ctx.saved_tensors[0] * ctx.saved_tensors[1]),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        import torch_offload
        x = torch.arange(4.0, device=device)
        w = torch.full((4,), 3.0).to("offload").requires_grad_()
        for fed in (x, x.to("offload")):
            w.grad = None
            square(fed, w).sum().backward()
            assert w.grad.is_offload
            assert w.grad.tolist() == [0.0, 6.0, 12.0, 18.0]
        """
    )


def adds_to(space, seen):
    """An operation that the device alone has a kernel for; it adds to its first argument and returns something new."""

    @torch.library.custom_op(f"{space}::add_to", mutates_args=("total",), device_types=COMPUTE.type)
    def add_to(total: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.append((total.device, x.device, w.device))
        total.add_(x * w)
        return total * 2

    return add_to


@pytest.mark.parametrize("born", ["host", "device"])
@pytest.mark.parametrize("target", ["plain", "offload"])
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_an_argument_that_the_device_alone_writes_to(born, target, feed):
    seen = []
    add_to = adds_to(next(SPACES), seen)
    w, total, x = at(OFFLOAD, 4), at(COMPUTE, 4, seed=1), at(COMPUTE, 4, seed=2)
    if born == "device":
        w = w * 1
    expected_total = total.clone()
    expected = add_to(expected_total, x, w.to(COMPUTE))
    if target == "offload":
        total = total.to(OFFLOAD) * 1 if born == "device" else total.to(OFFLOAD)
    if feed == "offload":
        x = x.to(OFFLOAD)
    version = total._version
    result = add_to(total, x, w)
    assert total._version > version
    assert total.device.type == ("offload" if target == "offload" else COMPUTE.type)
    assert result.device.type == ("offload" if target == feed == "offload" else COMPUTE.type)
    assert {device for call in seen for device in call} == {COMPUTE}
    assert_same((result, total), (expected, expected_total))


class Added(torch.autograd.Function):
    """What its author makes of it, as PyTorch takes no formula for an operation that writes to its arguments."""

    @staticmethod
    def forward(ctx, x, w, add_to):
        total = torch.zeros_like(x)
        ctx.save_for_backward(x, w)
        ctx.add_to = add_to
        return add_to(total, x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        totals = torch.zeros_like(g), torch.zeros_like(g)
        ctx.add_to(totals[0], g, w)
        ctx.add_to(totals[1], g, x)
        return 2 * totals[0], 2 * totals[1], None


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_gradients_through_an_argument_that_is_written_to(feed):
    seen = []
    add_to = adds_to(next(SPACES), seen)
    x = at(COMPUTE if feed == "plain" else OFFLOAD, 4).requires_grad_()
    w = at(OFFLOAD, 4, seed=1).requires_grad_()
    y = Added.apply(x, w, add_to)
    y.sum().backward()
    assert (y.device, x.grad.device, w.grad.device.type) == (x.device, x.device, "offload")
    assert {device for call in seen for device in call} == {COMPUTE}
    plain_x, plain_w = (t.detach().to(COMPUTE).requires_grad_() for t in (x, w))
    plain_y = Added.apply(plain_x, plain_w, add_to)
    plain_y.sum().backward()
    assert_same((y, x.grad, w.grad), (plain_y, plain_x.grad, plain_w.grad))


def test_a_derivative_that_comes_later():
    """After a first call that needed none."""
    seen = []
    scale = custom(f"{next(SPACES)}::scale", seen)
    x, w = numbers()
    w = w.to(OFFLOAD)
    assert_same(scale(x, w), x * 2)
    give_gradients(scale)
    w.requires_grad_()
    scale(x, w).sum().backward()
    assert w.grad.is_offload
    assert_same(w.grad, x)


def test_a_definition_that_is_replaced():
    """As a notebook's cell does when it runs again: another signature under the same name."""
    name = f"{next(SPACES)}::scale"
    x, w = numbers()
    w = w.to(OFFLOAD)
    assert_same(custom(name, [])(x, w), x * 2)

    @torch.library.custom_op(name, mutates_args=())
    def scale(factor: float, w: torch.Tensor, x: torch.Tensor, rest: list[torch.Tensor]) -> torch.Tensor:
        assert len({t.device for t in (w, x, *rest)}) == 1
        return factor * x * w + sum(rest)

    assert_same(scale(3.0, w, x, [w, x]), 3 * x * 2 + 2 + x)


def test_wrapped_operands_get_the_kernel_that_was_there(library):
    """vmap opens its wrappers itself, and what is inside comes back."""
    library.define("scale(Tensor x, Tensor w) -> Tensor")
    library.impl("scale", lambda x, w: x * w, "CompositeImplicitAutograd")
    x, w = numbers()
    operation = getattr(torch.ops, library.ns).scale
    assert_same(torch.vmap(operation, in_dims=(0, None))(x, w.to(OFFLOAD)[0]), x * 2)


def test_plain_operands_are_left_alone(library):
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", lambda x: x * 2, "CPU")
    x = torch.ones(3, requires_grad=True)
    y = getattr(torch.ops, library.ns).scale(x)
    assert y.device == CPU
    assert_same(y, 2 * x)


def test_a_write_beside_a_new_value_is_computed(library):
    """Like a norm with running statistics: the new value decides where, and what is written to follows."""
    library.define("norm(Tensor x, Tensor(a!) mean) -> Tensor")

    def norm(x, mean):
        mean.mul_(0.5).add_(x.mean())
        return x - x.mean()

    library.impl("norm", norm, "CompositeExplicitAutograd")
    operation = getattr(torch.ops, library.ns).norm
    x, _ = numbers()
    mean = torch.ones((), device=COMPUTE)
    expected = operation(x, mean)
    for place in (COMPUTE, OFFLOAD):
        running = torch.ones((), device=OFFLOAD)
        version = running._version
        result = operation(x.to(place), running)
        assert result.device.type == place.type
        assert running.device.type == "offload"
        assert running._version > version
        assert_same((result, running), (expected, mean))


@pytest.mark.gpu
def test_a_write_without_a_kernel_on_the_host(library):
    library.define("double_(Tensor(a!) x) -> ()")
    library.impl("double_", lambda x: (x.mul_(2), None)[1], "CUDA")
    x = torch.arange(4.0, device=OFFLOAD)
    getattr(torch.ops, library.ns).double_(x)
    assert x.device.type == "offload"
    assert x.tolist() == [0.0, 2.0, 4.0, 6.0]
