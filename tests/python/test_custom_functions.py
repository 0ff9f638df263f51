"""Users' ``torch.autograd.Function``s over offload weights, kept on ``ctx`` or saved."""

import pytest
import torch
from helpers import CACHED, COMPUTE, GPU, OFFLOAD, at, data, same
from torch.utils.checkpoint import checkpoint

import torch_offload


class KeepsTheWeight(torch.autograd.Function):
    """What many quantised layers do: the weight is kept on ``ctx`` and not saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class SavesTheWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@pytest.mark.parametrize("function", [KeepsTheWeight, SavesTheWeight])
def test_custom_function_is_given_a_fetched_weight(function):
    def run(device):
        weights = [data(8, 8, device=device, seed=k).requires_grad_() for k in range(4)]
        x = data(3, 8).requires_grad_()
        h = x
        for weight in weights:
            h = function.apply(h, weight.to(COMPUTE)).tanh()
        h.square().sum().backward()
        assert all(w.grad.device == w.device for w in weights)
        return h, x.grad, [w.grad for w in weights]

    same(run)


@pytest.mark.parametrize("beside", ["plain", "offload"])
@pytest.mark.parametrize("boxed", [False, True])
def test_a_gradient_is_brought_to_its_operand(boxed, beside):
    weight = at(OFFLOAD, 8, 8, seed=1).requires_grad_()
    home = at(OFFLOAD if beside == "plain" else COMPUTE, 8, 8)
    x = data(8, 8, device=OFFLOAD if beside == "offload" else COMPUTE).requires_grad_()

    class Elsewhere(torch.autograd.Function):
        boxed_grads_call = boxed  # a list of gradients, for PyTorch since 2.15

        @staticmethod
        def forward(ctx, x, weight):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            if isinstance(gradient, list):
                gradient = gradient.pop()
            return gradient * 2, torch.ones_like(home) * 3

    Elsewhere.apply(x, weight).sum().backward()
    assert weight.grad.device == weight.device
    assert x.grad.device == x.device
    assert torch.equal(weight.grad.cpu(), torch.full((8, 8), 3.0))
    assert torch.equal(x.grad.cpu(), torch.full((8, 8), 2.0))


class NeedsNoWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.sizes = weight.shape
        return x + weight.sum(1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.sum(0)[:, None].expand(ctx.sizes)


@pytest.mark.skipif(not CACHED, reason="what is fetched is the host's memory itself")
@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (KeepsTheWeight, lambda node: node.weight),
        (SavesTheWeight, lambda node: node.saved_tensors[1]),
        (NeedsNoWeight, None),
    ],
)
def test_what_a_function_keeps_has_memory_in_its_backward_only(function, kept):
    weight, x = data(512, 512, device=OFFLOAD).requires_grad_(), data(3, 512).requires_grad_()
    function.apply(x, weight)  # the first product of a process allocates a workspace for good
    torch_offload.empty_cache()
    held = torch.cuda.memory_allocated() if GPU else 0
    y = function.apply(x, weight)
    if kept is not None:
        with pytest.raises(RuntimeError, match="has memory only while its backward runs"):
            kept(y.grad_fn).data_ptr()
    if GPU:
        torch_offload.empty_cache()
        assert torch.cuda.memory_allocated() - held < weight.nbytes
    before = torch_offload.memory_stats()["cache.fetches"]
    y.sum().backward(retain_graph=True)
    weight.grad = None  # gradients that are in the cache are summed there, which fetches both
    y.sum().backward()
    assert torch_offload.memory_stats()["cache.fetches"] - before == (2 if kept is not None else 0)


def test_what_a_function_keeps_and_has_changed_is_refused():
    def run(device):
        weight, x = data(8, 8, device=device).requires_grad_(), data(3, 8).requires_grad_()
        y = SavesTheWeight.apply(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    same(run)


@pytest.mark.parametrize("function", [KeepsTheWeight, SavesTheWeight])
def test_custom_function_mixes_an_offload_weight_with_plain_activations(function):
    def run(device):
        weights = [data(8, 8, device=device, seed=k).requires_grad_() for k in range(4)]
        x = data(3, 8).requires_grad_()
        h = x
        for weight in weights:
            h = function.apply(h, weight).tanh()
        h.square().sum().backward()
        assert all(w.grad.device == w.device for w in weights)
        return h, x.grad, [w.grad for w in weights]

    same(run)


class CountsCalls(torch.autograd.Function):
    """Keeps count in an operand, in forward and, by way of its context, in backward."""

    @staticmethod
    def forward(ctx, x, count, marked):
        count.add_(1)
        if marked:
            ctx.mark_dirty(count)
        ctx.count = count
        return (x * 2, count) if marked else x * 2

    @staticmethod
    def backward(ctx, gradient, *others):
        ctx.count.mul_(3)
        return gradient * 2, None, None


class CountsWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        ctx.save_for_backward(count)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (count,) = ctx.saved_tensors
        count.add_(1)
        return gradient * 2, None


def read_every_way(tensor):
    """The host's bytes, the cache's, and what is fetched anew."""
    seen = [tensor.cpu().clone(), (tensor + torch.zeros(3, device=COMPUTE)).cpu()]
    torch_offload.empty_cache()
    return [*seen, (tensor + torch.zeros(3, device=COMPUTE)).cpu()]


@pytest.mark.parametrize("marked", [False, True])
def test_what_a_function_writes_comes_home(marked):
    def run(device):
        count, x = at("cpu", 3).to(device), data(3).requires_grad_()
        before = count._version
        results = CountsCalls.apply(x, count, marked)
        y = results[0] if marked else results
        versions = count._version - before
        seen = read_every_way(count)
        y.sum().backward()
        seen += read_every_way(count)
        CountsCalls.apply(x, count, marked)
        return seen, read_every_way(count), versions, x.grad

    same(run)


def test_what_a_function_writes_to_a_saved_operand_comes_home():
    def run(device):
        count, x = at("cpu", 3).to(device), data(3).requires_grad_()
        CountsWhatItSaved.apply(x, count).sum().backward()
        return read_every_way(count)

    same(run)


class CountsAndSaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        count.add_(1)
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * 2, None


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_function_writes_within_a_checkpoint_comes_home(reentrant):
    """Without reentrance its recomputation ends as soon as it has saved."""

    def run(device):
        count, x = at("cpu", 3).to(device), data(3).requires_grad_()
        y = checkpoint(lambda x: CountsAndSaves.apply(x, count), x, use_reentrant=reentrant)
        y.sum().backward()
        return read_every_way(count), x.grad

    same(run)


def test_a_write_of_the_users_between_forward_and_backward():
    def run(device):
        count, x = torch.zeros(3, device=device), data(3).requires_grad_()
        y = CountsCalls.apply(x, count, False)
        count.fill_(7)
        y.sum().backward()
        return read_every_way(count)

    same(run)
