"""Users' ``torch.autograd.Function``s that know an offload operand by more than the argument: as a module's parameter, by
what was put on it, or as their result."""

import weakref

import pytest
import torch
from helpers import CACHED, COMPUTE, OFFLOAD, data, same
from torch import nn
from torch.autograd.graph import get_gradient_edge

import torch_offload


class ChecksPoints(torch.autograd.Function):
    """As guided diffusion's checkpoint(): is given what its backward differentiates with respect to."""

    @staticmethod
    def forward(ctx, module, length, unused, *args):
        ctx.module, ctx.inputs, ctx.parameters, ctx.unused = module, args[:length], list(args[length:]), unused
        with torch.no_grad():
            return module(*ctx.inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            y = ctx.module(*[x.view_as(x) for x in inputs])
        return None, None, None, *torch.autograd.grad(y, inputs + ctx.parameters, gradient, allow_unused=ctx.unused)


class SavesPoints(ChecksPoints):
    @staticmethod
    def forward(ctx, module, length, unused, *args):
        ctx.save_for_backward(*args[length:])
        return ChecksPoints.forward(ctx, module, length, unused, *args)

    @staticmethod
    def backward(ctx, gradient):
        ctx.parameters = list(ctx.saved_tensors)
        return ChecksPoints.backward(ctx, gradient)


class AsksTheModule(ChecksPoints):
    """Returns the gradients of the parameters that it finds in the module, for the operands."""

    @staticmethod
    def backward(ctx, gradient):
        ctx.parameters = list(ctx.module.parameters())
        return ChecksPoints.backward(ctx, gradient)


def small_net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)


@pytest.mark.parametrize("place", [COMPUTE, OFFLOAD], ids=str)
@pytest.mark.parametrize("function", [ChecksPoints, SavesPoints, AsksTheModule])
def test_gradients_with_respect_to_what_a_function_is_given(function, place):
    def run(device):
        net = small_net(device)
        x = data(6, 8, device=place if device == OFFLOAD else device).requires_grad_()
        for _ in range(2):  # gradients add up
            function.apply(net, 1, False, x, *net.parameters()).square().mean().backward()
        assert all(parameter.grad.device == parameter.device for parameter in net.parameters())
        return x.grad, [parameter.grad for parameter in net.parameters()]

    same(run)


@pytest.mark.parametrize("unused", [True, False])
def test_gradients_with_respect_to_what_has_no_part_in_it(unused):
    def run(device):
        net, other = small_net(device), data(3, device=device).requires_grad_()
        x = data(6, 8).requires_grad_()
        y = ChecksPoints.apply(net, 1, unused, x, *net.parameters(), other).sum()
        if not unused:
            with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
                y.backward()
            return None
        y.backward()
        assert other.grad is None
        return x.grad, [parameter.grad for parameter in net.parameters()]

    same(run)


class AddsToWhatItIsGiven(ChecksPoints):
    @staticmethod
    def backward(ctx, gradient):
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            y = ctx.module(*inputs)
        torch.autograd.backward(y, gradient, inputs=inputs + ctx.parameters)
        return (
            None,
            None,
            None,
            inputs[0].grad,
            *[None] * len(ctx.parameters),
            None,
            None,
        )  # some more than were asked for


class AsksByEdges(ChecksPoints):
    @staticmethod
    def backward(ctx, gradient):
        ctx.parameters = list(map(get_gradient_edge, ctx.parameters))
        return ChecksPoints.backward(ctx, gradient)


@pytest.mark.parametrize("function", [AddsToWhatItIsGiven, AsksByEdges])
def test_other_ways_to_ask_for_gradients(function):
    def run(device):
        net, x = small_net(device), data(6, 8).requires_grad_()
        for _ in range(2):
            function.apply(net, 1, False, x, *net.parameters()).square().mean().backward()
        return x.grad, [parameter.grad for parameter in net.parameters()]

    same(run)


class UsesBoth(torch.autograd.Function):
    """The operand and the parameter, which are one."""

    @staticmethod
    def forward(ctx, x, weight, parameter):
        ctx.save_for_backward(x)
        ctx.weight, ctx.parameter = weight, parameter[0]
        return x @ weight + x @ parameter[0].tanh().to(x.device)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach()
        with torch.enable_grad():
            y = x @ ctx.weight + x @ ctx.parameter.tanh().to(x.device)
        return None, *torch.autograd.grad(y, [ctx.weight], gradient), None


def test_gradients_by_way_of_the_operand_and_of_the_parameter():
    def run(device):
        weight = data(4, 4, device=device).requires_grad_()
        UsesBoth.apply(data(3, 4, seed=1), weight, [weight]).square().sum().backward()
        return weight.grad

    torch.testing.assert_close(run(OFFLOAD).cpu(), run(COMPUTE).cpu())


class AddsUp(torch.autograd.Function):
    """As Megatron does: adds the weight's gradient to what it finds on the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        of_weight = gradient.t() @ x
        if hasattr(ctx.weight, "main_grad"):
            ctx.weight.main_grad.add_(of_weight)
        elif ctx.weight.grad is None:
            ctx.weight.grad = of_weight
        else:
            ctx.weight.grad.add_(of_weight)
        return gradient @ ctx.weight, None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("has_main", [False, True])
def test_gradients_that_a_backward_adds_up_by_itself(has_main):
    def run(device):
        weight, x = nn.Parameter(data(4, 8, device=device)), data(6, 8).requires_grad_()
        if has_main:
            weight.main_grad = torch.zeros_like(weight)
        for _ in range(3):
            AddsUp.apply(x, weight).square().sum().backward()
        found = weight.main_grad if has_main else weight.grad
        assert found.device == weight.device
        assert (weight.grad is None) == has_main
        return found, x.grad

    same(run)


class TellsWhatItHasAdded(AddsUp):
    """As Megatron does: what it returns is a gradient that a hook is to leave out, where the weight says so."""

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.main_grad.add_(gradient.t() @ ctx.saved_tensors[0])
        ctx.weight.added = True
        return gradient @ ctx.weight, torch.full_like(ctx.weight, torch.nan)


def test_what_a_backward_puts_on_its_operand():
    def run(device):
        weight = nn.Parameter(data(4, 8, device=device))
        weight.main_grad, weight.added = torch.zeros_like(weight), False

        def hook(parameter):
            if not parameter.added:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        weight.register_post_accumulate_grad_hook(hook)
        TellsWhatItHasAdded.apply(data(6, 8), weight).square().sum().backward()
        assert weight.added
        return weight.main_grad

    same(run)


class RetainsItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        weight = ctx.weight
        weight.retain_grad()  # of a leaf, nothing
        with torch.enable_grad():
            (ctx.saved_tensors[0].detach() @ weight).backward(gradient)
        return None, None


def test_a_gradient_that_is_retained_is_added_once():
    def run(device):
        weight = nn.Parameter(data(4, 4, device=device))
        RetainsItsGradient.apply(data(3, 4, seed=1), weight).square().sum().backward()
        return weight.grad

    same(run)


def test_a_function_that_is_given_a_weight_alone():
    def run(device):
        x, weight = data(6, 8), data(4, 8, device=device, seed=1).requires_grad_()

        class ClosesOver(torch.autograd.Function):
            @staticmethod
            def forward(ctx, weight):
                return x @ weight.t()

            @staticmethod
            def backward(ctx, gradient):
                return gradient.t() @ x

        ClosesOver.apply(weight).square().sum().backward()
        assert weight.grad.device == weight.device
        return weight.grad

    same(run)


class ScalesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.mark_dirty(x)
        x.mul_(factor)
        ctx.save_for_backward(factor)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


class ExponentInPlace(torch.autograd.Function):
    """Saves what it has written, which is its result."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.mark_dirty(x)
        x.exp_().mul_(factor)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.parametrize("function", [ScalesInPlace, ExponentInPlace])
def test_an_operand_that_is_changed_in_place(function):
    def run(device):
        x, factor = data(3, 4, device=device).requires_grad_(), torch.tensor([2.0, 3.0, 0.5, 1.0], device=COMPUTE)
        y = x * 1
        before = y._version
        z = function.apply(y, factor)
        assert z is y
        assert z.device == x.device
        (z * y).sum().backward()
        return x.grad, y, y._version - before

    same(run)


@pytest.mark.parametrize("backward", [False, True])
def test_an_operand_that_is_changed_in_place_goes_when_nobody_has_it(backward):
    x, factor = data(3, 4, device=OFFLOAD).requires_grad_(), torch.full((4,), 2.0, device=COMPUTE)
    y = x * 1
    z = ScalesInPlace.apply(y, factor)
    if backward:
        z.sum().backward()
    gone = weakref.ref(y)
    del y, z
    assert gone() is None


def test_a_state_that_takes_over_the_result_goes_when_nobody_has_it():
    state, x = data(3, 4, device=OFFLOAD), data(3, 4).requires_grad_()
    state.copy_(KeepsBoth.apply(x, state))
    gone = weakref.ref(state)
    del state
    assert gone() is None


class KeepsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.save_for_backward(x, state)
        return x * state

    @staticmethod
    def backward(ctx, gradient):
        x, state = ctx.saved_tensors
        return gradient * state, gradient * x


class ScalesTangentsInPlace(ScalesInPlace):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return ScalesInPlace.forward(ctx, x, factor)

    @staticmethod
    def jvp(ctx, tangent, of_factor):
        return tangent.mul_(ctx.factor)


def test_the_tangent_of_what_is_changed_in_place():
    def run(device):
        factor = torch.full((4,), 2.0, device=COMPUTE)
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(data(3, 4, device=device), data(3, 4, device=device, seed=3))
            ScalesTangentsInPlace.apply(x, factor)
            return tuple(torch.autograd.forward_ad.unpack_dual(x))

    same(run)


def test_an_operand_that_is_changed_in_place_without_gradients():
    def run(device):
        x, factor = data(3, 4, device=device), torch.full((4,), 2.0, device=COMPUTE)
        with torch.no_grad():
            result = ScalesInPlace.apply(x, factor)
        assert result is x
        result.add_(10)
        return x

    same(run)


def test_a_leaf_that_is_changed_in_place_is_refused():
    x = torch.ones(2, device=OFFLOAD, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        ScalesInPlace.apply(x, torch.ones(2, device=COMPUTE))


class Appends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cache):
        cache[0] = x
        return x + cache.sum(0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_in_inference_mode_come_home(mode):
    def run(device):
        with mode():
            caches = [torch.zeros(3, 4, device=device), data(3, 4, device=device) * 2]
            results = [Appends.apply(data(4), cache) for cache in caches]
            return [cache + 0 for cache in caches], [cache.cpu() for cache in caches], results

    same(run)


@pytest.mark.skipif(not CACHED, reason="nothing is copied where there is no cache")
def test_reads_in_inference_mode_copy_nothing_home():
    with torch.inference_mode():
        weight = data(4, 8).to(OFFLOAD)
        torch_offload.synchronize()
        before = torch_offload.memory_stats()["link.copies_to_host"]
        for _ in range(3):
            KeepsBoth.apply(data(4, 8), weight)
        torch_offload.synchronize()
        assert torch_offload.memory_stats()["link.copies_to_host"] == before


class WritesInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        count.add_(1)
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.count, None


@pytest.mark.skipif(not CACHED, reason="nothing is copied where there is no cache")
def test_a_write_in_forward_comes_home_once():
    count, x = torch.zeros(3).to(OFFLOAD), data(3).requires_grad_()

    def copies(run):
        torch_offload.synchronize()
        before = torch_offload.memory_stats()["link.copies_to_host"]
        value = run()
        torch_offload.synchronize()
        return value, torch_offload.memory_stats()["link.copies_to_host"] - before

    y, written = copies(lambda: WritesInForward.apply(x, count).sum())
    assert written == 1
    assert copies(y.backward)[1] == 0
    torch.testing.assert_close(x.grad.cpu(), torch.ones(3))


class Generated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_with_respect_to_an_operand(transform):
    def run(device):
        x, weight = data(4), data(4, device=device, seed=1)
        function = Generated.apply if transform is torch.func.jacrev else lambda x, w: Generated.apply(x, w).sum()
        return transform(lambda w: function(x, w))(weight)

    same(run)


class Remembers(nn.Module):
    def forward(self, x, memory, weight):
        memory[0] = x[0].detach()
        memory.add_(1)
        return x @ weight


def test_a_module_with_a_backward_hook_writes_to_its_operand():
    def run(device):
        module = Remembers()
        found = []
        module.register_full_backward_hook(lambda _, inputs, outputs: found.extend([*inputs, *outputs]))
        weight, memory = data(4, 4, device=device).requires_grad_(), torch.zeros(2, 4, device=device)
        x = data(3, 4).requires_grad_()
        for _ in range(2):
            module(x, memory, weight).sum().backward()
        return memory, x.grad, weight.grad, [value for value in found if value is not None]

    same(run)


def test_a_view_that_is_changed_in_place():
    def run(device):
        x, factor = data(3, 4, device=device).requires_grad_(), torch.full((4,), 2.0, device=COMPUTE)
        y = x * 1
        z = ScalesInPlace.apply(y[1:], factor)
        (y.sum() + z.sum()).backward()
        return x.grad, y

    same(run)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


@pytest.mark.parametrize("change", ["half", "load"])
def test_a_parameter_may_be_swapped_while_its_graph_lives(change):
    """``torch.utils.swap_tensors`` refuses a tensor that somebody has a weak reference to."""

    def run(device):
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(data(4, 4, device=device))
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            loss = Product.apply(data(3, 4), module.weight).sum()
            loss.backward()
            before, gradient = module.weight, module.weight.grad.clone()
            if change == "half":
                module.half()
            else:
                module.load_state_dict({"weight": data(4, 4, device=device)})
            assert module.weight is before
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        return loss, gradient, module.weight.dtype, module.weight

    same(run)
