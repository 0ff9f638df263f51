"""Activation checkpointing, and saved-tensor hooks of the user's."""

import functools

import pytest
import torch
from helpers import CACHED, COMPUTE, GPU, OFFLOAD, at, data, grads, same, values
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import torch_offload


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def training(forward, dropout=0.0, feed="plain"):
    def run(device):
        blocks = nn.ModuleList([Block(dropout) for _ in range(4)]).to(device)
        x = torch.randn(3, 8).to(device if feed == "offload" else COMPUTE).requires_grad_()
        torch.manual_seed(1)
        y = forward(blocks, x)
        y.square().sum().backward()
        return y, x.grad, grads(blocks)

    return run


def same_step(step, make=lambda: nn.Linear(8, 8)):
    """Runs ``step(module, x)`` on both devices: the same result, and the same gradients of the input and the module."""

    def run(device):
        module = make().to(device)
        x = torch.randn(3, 8).to(COMPUTE).requires_grad_()
        return step(module, x), x.grad, grads(module)

    same(run)


def every(blocks, x, **kwargs):
    for block in blocks:
        x = checkpoint(block, x, **kwargs)
    return x


@pytest.mark.memcheck
@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant, dropout, feed):
    same(training(functools.partial(every, use_reentrant=reentrant), dropout, feed))


@pytest.mark.parametrize("reentrant", [True, False])
def test_equal_to_no_checkpointing(reentrant):
    def plain(blocks, x):
        for block in blocks:
            x = block(x)
        return x

    torch.manual_seed(0)
    one = training(functools.partial(every, use_reentrant=reentrant))(torch.device("offload"))
    torch.manual_seed(0)
    other = training(plain)(torch.device("offload"))
    for a, b in zip([*one[:2], *one[2].values()], [*other[:2], *other[2].values()], strict=True):
        assert torch.equal(a.cpu(), b.cpu())


REENTRANT = {"both": (True, True), "neither": (False, False), "outer": (True, False), "inner": (False, True)}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", REENTRANT)
def test_nested(reentrant, dropout):
    outside, inside = REENTRANT[reentrant]

    def nested(blocks, x):
        def first(x):
            return checkpoint(blocks[1], checkpoint(blocks[0], x, use_reentrant=inside), use_reentrant=inside)

        def second(x):
            return checkpoint(blocks[3], blocks[2](x), use_reentrant=inside)

        return checkpoint(second, checkpoint(first, x, use_reentrant=outside), use_reentrant=outside)

    same(training(nested, dropout))


def test_sequential():
    same(training(lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=False)))


class Counting(TorchDispatchMode):
    """How often each operation of ``FORWARD`` is called."""

    def __init__(self):
        super().__init__()
        self.calls = dict.fromkeys(FORWARD, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.calls:
            self.calls[func] += 1
        return func(*args, **(kwargs or {}))


FORWARD = [torch.ops.aten.addmm.default, torch.ops.aten.gelu.default, torch.ops.aten.native_layer_norm.default]


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("saved", FORWARD, ids=str)
def test_selective(saved, feed):
    """A backward calls what is not saved once more, and what is saved never."""

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is saved else CheckpointPolicy.MUST_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    forward = functools.partial(every, use_reentrant=False, context_fn=contexts)
    same(training(forward, feed=feed))

    def calls(device, fed):
        x = data(3, 8, device=fed).requires_grad_()
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            y = forward(nn.ModuleList([Block() for _ in range(4)]).to(device), x)
            with Counting() as counting:
                y.sum().backward()
        return counting.calls

    counted = calls(OFFLOAD, OFFLOAD if feed == "offload" else COMPUTE)
    assert counted == calls(COMPUTE, COMPUTE)
    assert counted[saved] == 0
    assert all(counted[op] >= 4 for op in FORWARD if op is not saved)


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop(early_stop):
    def run(blocks, x):
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            return every(blocks, x, use_reentrant=False)

    same(training(run))


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["pair", "offload"])
def test_under_autocast(name, reentrant, feed):
    """What is recomputed in backward, outside of the region, is computed under the same autocast."""

    def run(device):
        blocks = nn.ModuleList([Block() for _ in range(2)]).to(device)
        x = torch.randn(3, 8).to(device if feed == "offload" else COMPUTE).requires_grad_()
        with torch.autocast(device.type if name == "offload" else COMPUTE.type, torch.bfloat16):
            y = every(blocks, x, use_reentrant=reentrant)
        y.square().sum().backward()
        return y, x.grad, grads(blocks)

    same(run)


def test_without_preserving_random_states():
    same(training(functools.partial(every, use_reentrant=False, preserve_rng_state=False)))


def test_checkpointed_with_a_weight_as_an_argument():
    def run(device):
        weight = torch.randn(8, 8).to(device).requires_grad_()
        x = torch.randn(3, 8).to(COMPUTE).requires_grad_()
        y = checkpoint(lambda x, w: (x @ w).tanh() @ w, x, weight, use_reentrant=False)
        y = y + checkpoint(lambda x, w: (x @ w).tanh(), x, weight, use_reentrant=True)
        y.square().sum().backward()
        return y, x.grad, weight.grad

    same(run)


@pytest.mark.parametrize("pin", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_save_on_cpu(pin):
    def forward(blocks, x):
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            for block in blocks:
                x = block(x)
        return x

    same(training(forward))


def test_saved_tensors_hooks_see_every_tensor():
    def step(layer, x):
        packed = []

        def pack(tensor):
            packed.append(tensor.clone())
            return len(packed) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: packed[k].clone()):
            y = layer(x).tanh()
        y.square().sum().backward()
        return y

    same_step(step)


def test_saved_tensors_hooks_that_move_to_offload():
    """What a user would write to keep activations on offload."""

    def step(net, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.device, t.to("offload")), lambda p: p[1].to(p[0])):
            y = net(x)
        y.square().sum().backward()
        return y

    same_step(step, lambda: nn.Sequential(*[Block() for _ in range(3)]))


def test_double_backward_of_a_checkpoint():
    def step(layer, x):
        y = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.square().sum().backward()
        return first

    same_step(step)


def test_disabled_hooks():
    def step(layer, x):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            y = layer(x)
        y.sum().backward()
        return y

    same_step(step)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs CUDA's generator")
@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_on_the_gpu_is_drawn_again(reentrant):
    same(training(functools.partial(every, use_reentrant=reentrant), 0.5, "offload"))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_statistics_of_a_batch_norm_in_a_checkpoint(reentrant, last):
    """The recomputation counts too; without reentrance it is left as soon as the last tensor is saved."""

    def run(device):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8).to(device)
        block = norm if last else nn.Sequential(norm, nn.Linear(8, 8).to(device))
        x = torch.randn(4, 8).to(COMPUTE).requires_grad_()
        for _ in range(2):
            checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
        return values(norm), x.grad, grads(block)

    same(run)


@pytest.mark.skipif(not CACHED, reason="there is no cache")
@pytest.mark.filterwarnings("ignore:Tensor arguments")
@pytest.mark.parametrize("reentrant", [True, False])
def test_weights_among_the_arguments_do_not_stay_on_the_device(reentrant):
    weights = [at(OFFLOAD, 64, 64, seed=k).requires_grad_() for k in range(8)]
    h = data(4, 64).requires_grad_()
    places = []

    def product(x, weight):
        places.append(weight.device.type)
        return (x @ weight).tanh()

    for weight in weights:
        h = checkpoint(product, h, weight, use_reentrant=reentrant)
    assert torch_offload.memory_stats()["device.pinned_slot_bytes.current"] < weights[0].nbytes
    h.sum().backward()
    assert set(places) == {"offload"}
    assert len(places) == 16
    assert all(weight.grad.device == weight.device for weight in weights)
