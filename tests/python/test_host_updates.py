"""Updates of large host tensors, by themselves, in lists and by fused optimizers: done while the program goes on."""

import copy

import pytest
import torch
from helpers import CACHED, COMPUTE, LATE, OFFLOAD, assert_same, data, layers, pending_jobs
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_offload

SIZE = 1 << 18  # elements of fp32 that are a MiB
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def submitted():
    return torch_offload.memory_stats().get("host_jobs.submitted", 0)


ONE = {
    "mul_ by a number": lambda a, b, c: a.mul_(0.9),
    "mul_": lambda a, b, c: a.mul_(b),
    "add_ a number": lambda a, b, c: a.add_(2, alpha=3),
    "add_": lambda a, b, c: a.add_(b, alpha=0.1),
    "+=": lambda a, b, c: a.__iadd__(b),
    "sub_": lambda a, b, c: a.sub_(b),
    "div_ by a number": lambda a, b, c: a.div_(3),
    "div_": lambda a, b, c: a.div_(b),
    "lerp_": lambda a, b, c: a.lerp_(b, 0.1),
    "lerp_ by a tensor": lambda a, b, c: a.lerp_(b, c),
    "addcmul_": lambda a, b, c: a.addcmul_(b, c, value=0.5),
    "addcdiv_": lambda a, b, c: a.addcdiv_(b, c, value=-0.5),
}
LISTS = {
    "foreach_mul_ by a number": lambda a, b, c: torch._foreach_mul_(a, 0.9),
    "foreach_mul_": lambda a, b, c: torch._foreach_mul_(a, b),
    "foreach_add_ a number": lambda a, b, c: torch._foreach_add_(a, 2),
    "foreach_add_": lambda a, b, c: torch._foreach_add_(a, b, alpha=0.1),
    "foreach_sub_": lambda a, b, c: torch._foreach_sub_(a, b),
    "foreach_div_": lambda a, b, c: torch._foreach_div_(a, b),
    "foreach_lerp_": lambda a, b, c: torch._foreach_lerp_(a, b, 0.1),
    "foreach_lerp_ by tensors": lambda a, b, c: torch._foreach_lerp_(a, b, c),
    "foreach_addcmul_": lambda a, b, c: torch._foreach_addcmul_(a, b, c, 0.5),
    "foreach_addcdiv_": lambda a, b, c: torch._foreach_addcdiv_(a, b, c, -0.5),
}


def operands(dtype, size=SIZE):
    return [data(size, seed=seed).cpu().to(dtype) + (5 if seed == 2 else 0) for seed in range(3)]


def versions(tensors):
    return [tensor._version for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("update", ONE)
def test_one(update, dtype):
    size = SIZE * 4 // dtype.itemsize
    truth = operands(dtype, size)
    ours = [tensor.to(OFFLOAD) for tensor in truth]
    before, mine = versions(truth), versions(ours)
    ONE[update](*truth)
    count = submitted()
    result = ONE[update](*ours)
    if CACHED:
        assert submitted() == count + 1
    if LATE:
        assert pending_jobs() == 1
    assert result is ours[0]
    assert [new - old for new, old in zip(versions(ours), mine, strict=True)] == [
        new - old for new, old in zip(versions(truth), before, strict=True)
    ]
    for tensor, other in zip(ours, truth, strict=True):
        assert_same(tensor.cpu(), other)


@pytest.mark.parametrize("update", LISTS)
def test_lists(update):
    """With a small tensor among them, and one that is in the list twice."""

    def lists(place):
        columns = [[tensor.to(place) for tensor in operands(torch.float32, size)] for size in (SIZE, 64, 2 * SIZE)]
        return [list(row) for row in zip(*columns, columns[0], strict=True)]

    truth, ours = lists("cpu"), lists(OFFLOAD)
    before, mine = [versions(row) for row in truth], [versions(row) for row in ours]
    LISTS[update](*truth)
    LISTS[update](*ours)
    if LATE:
        assert pending_jobs() == 4
    for row, old, other, old_other in zip(ours, mine, truth, before, strict=True):
        assert [new - was for new, was in zip(versions(row), old, strict=True)] == [
            new - was for new, was in zip(versions(other), old_other, strict=True)
        ]
        for tensor, value in zip(row, other, strict=True):
            assert_same(tensor.cpu(), value)


@pytest.mark.skipif(not CACHED, reason="nothing is done later")
def test_updates_on_end_wait_for_nobody():
    truth = operands(torch.float32)
    ours = [tensor.to(OFFLOAD) for tensor in truth]
    for a, b, c in (truth, ours):
        a.mul_(0.9).add_(b, alpha=0.1)
        b.lerp_(c, 0.5)
        a.addcmul_(b, c)
    if LATE:
        assert pending_jobs() == 4
    for tensor, other in zip(ours, truth, strict=True):
        assert_same(tensor.to(COMPUTE).cpu(), other)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_within_a_mode_that_the_thread_is_not_in(mode):
    with mode():
        truth = operands(torch.float32)
        ours = [tensor.to(OFFLOAD) for tensor in truth]
        for a, b, c in (truth, ours):
            a.mul_(0.9)
            torch._foreach_addcmul_([a], [b], [c], 0.5)
        assert not LATE or pending_jobs() == 2
    for tensor, other in zip(ours, truth, strict=True):
        assert_same(tensor.cpu(), other)


def test_history_of_an_update():
    """Autograd records it when it is called, and what it has saved of the operands is what they are by then."""

    def run(place):
        a, b, c = (tensor.to(place) for tensor in operands(torch.float32))
        b.requires_grad_()
        c.requires_grad_()
        y = a * 1
        y.mul_(b).addcmul_(b, c)
        a.mul_(2)
        y.sum().backward()
        return [y.detach(), b.grad, c.grad, a]

    for ours, truth in zip(run(OFFLOAD), run(COMPUTE), strict=True):
        assert_same(ours.cpu(), truth.cpu())


AT_ONCE = {
    "a small tensor": lambda a, b, c: a[:64].mul_(0.9),
    "broadcast": lambda a, b, c: a.view(2, -1).add_(b[: SIZE // 2]),
    "other strides": lambda a, b, c: a.view(512, 512).add_(b.view(512, 512).t()),
    "gaps": lambda a, b, c: a.view(2, -1)[:, 1:].mul_(2),
    "a number that may change": lambda a, b, c: a.mul_(torch.tensor(0.9)),
    "another dtype": lambda a, b, c: a.add_(b.double()),
    "itself": lambda a, b, c: a.mul_(a),
    "a device tensor": lambda a, b, c: a.add_(data(SIZE, seed=9)),
    "a number on offload": lambda a, b, c: a.add_(b[0]),
    "a list of numbers": lambda a, b, c: torch._foreach_mul_([a], [0.9]),
    "a mode of rounding": lambda a, b, c: a.div_(b, rounding_mode="floor"),
    "a product": lambda a, b, c: a.copysign_(b),
}


@pytest.mark.parametrize("update", AT_ONCE)
def test_what_is_done_at_once(update):
    truth = [tensor.to(COMPUTE) for tensor in operands(torch.float32)]
    ours = [tensor.to(OFFLOAD) for tensor in truth]
    AT_ONCE[update](*truth)
    AT_ONCE[update](*ours)
    assert pending_jobs() == 0
    for tensor, other in zip(ours, truth, strict=True):
        assert_same(tensor.cpu(), other.cpu())


WRONG = {
    "sizes": lambda a: a.add_(torch.ones(3).to(OFFLOAD)),
    "a complex number": lambda a: a.mul_(1j),
    "a bool": lambda a: a.sub_(True),
    "a bool for alpha": lambda a: a.add_(a.clone(), alpha=True),
    "an integer tensor": lambda a: a.long().mul_(0.5),
    "overlap": lambda a: a[1:].add_(a[:-1]),
    "lists of other lengths": lambda a: torch._foreach_add_([a, a], [a]),
    "sizes in lists": lambda a: torch._foreach_add_([a], [torch.ones(3).to(OFFLOAD)]),
    "a dtype of weights": lambda a: a.lerp_(a.clone(), a.double()),
    "a number that the dtype does not hold": lambda a: a.half().add_(a.half(), alpha=1e5),
    "lists of fused steps": lambda a: torch._fused_sgd_(
        [a, a.clone()],
        [a.clone()],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    ),
    "a mode": lambda a: a.div_(a.clone(), rounding_mode="up"),
    "a leaf": lambda a: a.requires_grad_().mul_(2),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_are_told_at_once(wrong):
    ours = data(SIZE).to(OFFLOAD)
    with pytest.raises((RuntimeError, TypeError)):
        WRONG[wrong](ours)
    assert pending_jobs() == 0
    assert_same(ours.detach().cpu(), data(SIZE).cpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_step_that_fails_does_so_at_once(dtype):
    rate = 1e5 if dtype is torch.float16 else 1e39
    for place in (OFFLOAD, "cpu"):
        leaf = nn.Parameter(torch.ones(SIZE, dtype=dtype).to(place))
        leaf.grad = torch.ones(SIZE, dtype=dtype).to(place)
        with pytest.raises(RuntimeError, match="without overflow"):
            torch.optim.SGD([leaf], lr=rate, foreach=False).step()
        assert_same(leaf.detach().cpu(), torch.ones(SIZE, dtype=dtype))


def test_a_gradient_that_overlaps_its_parameter():
    for place in (OFFLOAD, "cpu"):
        flat = torch.ones(2 * SIZE).to(place)
        leaf = nn.Parameter(flat[:SIZE])
        leaf.grad = flat[100 : 100 + SIZE]
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.optim.SGD([leaf], lr=0.1, foreach=False).step()


def test_denormal_numbers_are_flushed_as_where_the_update_was_called():
    if not torch.set_flush_denormal(True):
        pytest.skip("not on this processor")
    try:
        ours = torch.full((SIZE,), 1e-38).to(OFFLOAD)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        ours.mul_(1e-3)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert ours.cpu().count_nonzero() == 0


@pytest.mark.parametrize("multi", [False, True])
def test_moving_averages(multi):
    def run(place):
        torch.manual_seed(0)
        net = layers(3, 512).to(place)
        how = (
            {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
            if multi
            else {"avg_fn": lambda mean, new, _: mean.lerp_(new, 0.1)}
        )
        mean = AveragedModel(net, **how)
        for k in range(4):
            for p in net.parameters():
                p.data.mul_(0.5 + k)
            mean.update_parameters(net)
        return mean

    count = submitted()
    for ours, truth in zip(run(OFFLOAD).parameters(), run("cpu").parameters(), strict=True):
        assert_same(ours.detach().cpu(), truth.detach())
    assert not CACHED or submitted() > count


FUSED = {
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, a learning rate that is a tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize("algorithm", FUSED)
def test_fused_optimizers(algorithm):
    kind, options = FUSED[algorithm]

    def run(place):
        leaves = [nn.Parameter(data(size, seed=size).cpu().to(place)) for size in (SIZE, 100, 5000)]
        optimizer = kind(leaves, fused=True, **copy.deepcopy(options))
        for k in range(3):  # the counts of steps go on before the host has used them
            for leaf in leaves:
                leaf.grad = data(leaf.numel(), seed=k).cpu().to(place)
            optimizer.step()
            if isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
                optimizer.param_groups[0]["lr"].mul_(0.5)
        # Adagrad's says that it writes to the counts of steps.
        assert place == "cpu" or not LATE or pending_jobs() == (0 if algorithm == "Adagrad" else 9)
        states = [
            value for leaf in leaves for value in optimizer.state[leaf].values() if isinstance(value, torch.Tensor)
        ]
        return leaves + states, [leaf._version for leaf in leaves] + [leaf.grad._version for leaf in leaves]

    (ours, mine), (truth, theirs) = run(OFFLOAD), run("cpu")
    assert mine == theirs
    for tensor, other in zip(ours, truth, strict=True):
        assert_same(tensor.detach().cpu(), other.detach())
