"""Operations of other libraries, defined before or after the first offload tensor, are served like PyTorch's own."""

import pytest
import torch
from helpers import COMPUTE, CPU, OFFLOAD, assert_same, passes

import torch_offload

SPACES = iter(f"offload_test_{k}" for k in range(100))
USED = torch.ones(1, device=OFFLOAD)  # from now on the package is in use


@pytest.fixture
def library():
    library = torch.library.Library(next(SPACES), "DEF")
    yield library
    library._destroy()


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
