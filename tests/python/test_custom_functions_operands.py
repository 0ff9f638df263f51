"""Users' ``torch.autograd.Function``s that know an offload operand by more than the argument: as a module's parameter, by
what was put on it, or as their result."""

import pytest
import torch
from helpers import COMPUTE, OFFLOAD, data, same
from torch import nn
from torch.autograd.graph import get_gradient_edge


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
