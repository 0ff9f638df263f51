"""``set_autocast_copies``: of what autocast casts, the host keeps copies in the lower precision, and these travel."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from helpers import CACHED, COMPUTE, GPU, OFFLOAD, assert_same, at, data, deterministic, grads, layers, says
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_offload

pytestmark = pytest.mark.skipif(not CACHED, reason="nothing travels")
LOWER = [torch.bfloat16, torch.float16]
ADAMW = {
    "jobs": {},
    "fused": {"fused": True},
    "lists": {"foreach": True},
}


@pytest.fixture(autouse=True)
def _copies():
    """Also of the small weights that are tested here, and each fetch is a copy over the link."""
    torch_offload._C.set_autocast_copies(True, least_bytes=0)
    torch_offload.set_budget(0)
    yield
    torch_offload.set_autocast_copies(False)
    torch_offload.set_budget("auto")


def both(run):
    """What the program gives with copies and without, which must be the same bits."""
    with deterministic():
        torch.manual_seed(0)
        actual = run()
        torch.offload.synchronize()
        torch_offload.set_autocast_copies(False)
        torch.manual_seed(0)
        expected = run()
        torch_offload._C.set_autocast_copies(True, least_bytes=0)
    assert_same(actual, expected)
    return actual


def use(net, x, dtype=torch.bfloat16):
    with torch.autocast(COMPUTE.type, dtype):
        return net(x)


def moved(function):
    """The bytes that went to the device meanwhile."""
    torch_offload.synchronize()
    torch_offload.empty_cache()
    before = torch_offload.stats()["bytes_to_device"]
    function()
    torch_offload.synchronize()
    return torch_offload.stats()["bytes_to_device"] - before


def kept_bytes():
    gc.collect()
    torch_offload.synchronize()
    return torch_offload.memory_stats().get("host.parameter_bytes.current", 0)


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("feed", [COMPUTE, OFFLOAD], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_half_the_bytes_travel(inference, feed, dtype):
    layer = nn.Linear(256, 256, bias=False).to(OFFLOAD)
    size, x = 4 * 256 * 256, data(3, 256).to(feed)
    with torch.inference_mode(inference):
        first = use(layer, x, dtype)  # makes the copy
        torch_offload.synchronize()
        uses = moved(lambda: assert_same(use(layer, x, dtype), first))
        assert uses in ({size // 2} if feed == COMPUTE else {size // 2, size // 2 + x.nbytes}), "x may be in the cache"
    if inference:
        return
    assert moved(lambda: use(layer, x, dtype).float().sum().backward()) <= size
    assert kept_bytes() >= size + size // 2
    assert_same(first, use(layer.to(COMPUTE), x, dtype))


def test_a_cache_holds_the_copies():
    layer, x = nn.Linear(256, 256, bias=False).to(OFFLOAD), data(3, 256)
    torch_offload.set_budget(1 << 20)
    for _ in range(4):
        use(layer, x)
    torch_offload.synchronize()
    before = torch_offload.stats()["bytes_to_device"]
    use(layer, x).float().sum().backward()
    assert torch_offload.stats()["bytes_to_device"] == before


@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_every_value_is_cast_as_the_device_casts(dtype):
    exponents = torch.arange(256, dtype=torch.int32) << 23
    mantissas = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF])
    positive = (exponents[:, None] | mantissas.int()).flatten()
    w = torch.cat([positive, positive | -(2**31)]).view(torch.float32)
    w = torch.cat([w, torch.randn(4096, generator=torch.Generator().manual_seed(0))]).view(-1, 32)
    weight, eye = w.to(OFFLOAD).requires_grad_(), torch.eye(1).to(COMPUTE)
    seen = []

    def read():
        with torch.autocast(COMPUTE.type, dtype), torch.no_grad():
            # What a product of one column by one is: the value itself.
            return torch.mm(weight.reshape(-1, 1), eye)

    expected = read()
    seen.append(read())
    number = expected.isnan().logical_not().cpu()
    assert number.sum() > 2 * 255 * 12
    assert_same(seen[0].cpu()[number], expected.cpu()[number])
    assert seen[0].isnan().equal(expected.isnan())


@pytest.mark.parametrize("how", ADAMW)
def test_training(how):
    def run():
        net = layers(3, 64).to(OFFLOAD)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **ADAMW[how])
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = use(net, data(4, 64, seed=step)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, list(net.parameters()), [state["exp_avg"] for state in optimizer.state.values()]

    both(run)


def test_a_step_moves_the_copies_alone():
    """Forward and backward fetch each weight once; the step on the host has made the copies anew before."""
    net = layers(3, 256).to(OFFLOAD)
    weights = [p for p in net.parameters() if p.dim() == 2]
    for p in net.parameters():
        p.requires_grad_(p.dim() == 2)
    optimizer = torch.optim.AdamW(weights, lr=0.01)

    def step():
        optimizer.zero_grad()
        use(net, data(4, 256)).float().square().mean().backward()
        optimizer.step()

    step()
    size, biases = sum(p.nbytes for p in weights), 2 * sum(p.nbytes for p in net.parameters() if p.dim() == 1)
    # The first layer's input needs no gradient, so its weight is fetched for forward alone.
    assert moved(step) <= size + biases


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.load_state_dict({"weight": at("cpu", 8, 8, seed=3), "bias": at("cpu", 8, seed=4)}),
        lambda layer: layer.weight.data.copy_(at("cpu", 8, 8, seed=5)),
        lambda layer: setattr(layer.weight, "data", at(OFFLOAD, 8, 8, seed=6)),
        lambda layer: layer.weight.lerp_(at(OFFLOAD, 8, 8, seed=7), 0.5),
        lambda layer: layer.weight[2:4].fill_(3),
        lambda layer: nn.init.normal_(layer.weight),
        lambda layer: layer.weight.copy_(at(COMPUTE, 8, 8, seed=8)),
        lambda layer: torch._foreach_mul_([layer.weight], 3.0),
    ],
    ids=["mul_", "load_state_dict", "data.copy_", "data", "lerp_", "slice", "init", "from the device", "list"],
)
def test_a_weight_that_was_written_to_has_no_old_copy(write):
    def run():
        layer, results = nn.Linear(8, 8).to(OFFLOAD), []
        for _ in range(3):
            results += [use(layer, data(3, 8)) for _ in range(3)]
            with torch.no_grad():
                write(layer)
        return results

    both(run)


def test_a_weight_that_was_written_to_before_its_backward_is_refused():
    layer = nn.Linear(8, 8).to(OFFLOAD)
    x = data(3, 8).requires_grad_()
    use(layer, x)
    y = use(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.float().sum().backward()


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_gradients_of_a_weight_that_is_used_several_times(cache):
    """Some uses in a region are of the weight, as it has no copy yet, and some of the copy."""

    def run():
        layer, losses = nn.Linear(8, 8).to(OFFLOAD), []
        for _ in range(2):
            with torch.autocast(COMPUTE.type, torch.bfloat16, cache_enabled=cache):
                y = layer(layer(layer(data(3, 8))))
            losses.append(y.float().square().sum())
        sum(losses).backward()
        return losses, grads(layer)

    both(run)


def test_a_gradient_is_cast_before_it_is_stashed():
    layer = nn.Linear(64, 64, bias=False).to(OFFLOAD)
    use(layer, data(3, 64))
    y = use(layer, data(3, 64)).float().sum()
    torch.offload.reset_peak_memory_stats()
    before = torch_offload.memory_stats().get("host.gradient_bytes.current", 0)
    y.backward()
    assert torch_offload.memory_stats()["host.gradient_bytes.peak"] - before == layer.weight.nbytes


def test_second_order():
    def run():
        layer = nn.Linear(8, 8).to(OFFLOAD)
        for _ in range(2):
            x = data(3, 8).requires_grad_()
            (gradient,) = torch.autograd.grad(use(layer, x).float().pow(3).sum(), layer.weight, create_graph=True)
            gradient.square().sum().backward()
        return x.grad, grads(layer)

    both(run)


def everything_saved(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("how", ["not reentrant", "reentrant", "selective"])
def test_checkpointing(how):
    def run():
        net = layers(3, 8).to(OFFLOAD)
        kwargs = {"use_reentrant": how == "reentrant"}
        if how == "selective":
            kwargs["context_fn"] = lambda: create_selective_checkpoint_contexts(everything_saved)
        for _ in range(3):
            x = data(3, 8).requires_grad_()
            with torch.autocast(COMPUTE.type, torch.bfloat16):
                y = checkpoint(net, x, **kwargs)
            y.float().square().sum().backward()
        return x.grad, grads(net)

    both(run)


@pytest.mark.parametrize("between", ["nothing", "off", "steps on the GPU"])
def test_saved_tensors_on_the_host(between):
    """What autograd saves of a copy is no activation. The settings may change before the backward."""

    def run():
        net = layers(3, 64).to(OFFLOAD)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            with torch_offload.saved_tensors():
                y = use(net, data(4, 64, seed=step).requires_grad_())
            kept = torch_offload.get_autocast_copies()
            if between == "off":
                torch_offload.set_autocast_copies(False)
            torch_offload.set_gpu_steps(between == "steps on the GPU")
            y.float().square().mean().backward()
            torch_offload.set_gpu_steps(False)
            torch_offload._C.set_autocast_copies(kept, least_bytes=0)
            optimizer.step()
        return y, list(net.parameters())

    both(run)


def test_views_and_other_layers():
    def run():
        net = nn.Sequential(nn.Conv1d(4, 6, 3), nn.Flatten(), nn.Linear(36, 8)).to(OFFLOAD)
        w = at(OFFLOAD, 8, 12).requires_grad_()
        for _ in range(3):
            with torch.autocast(COMPUTE.type, torch.bfloat16):
                y = net(data(2, 4, 8)) @ w[:, 2:7] + (w.t()[3:8] @ data(8, 2)).t()
            y.float().square().sum().backward()
        return y, w.grad, grads(net)

    both(run)


def test_both_lower_precisions_in_turn():
    def run():
        layer = nn.Linear(8, 8).to(OFFLOAD)
        return [use(layer, data(3, 8), dtype) for dtype in LOWER * 2 for _ in range(2)]

    both(run)


@pytest.mark.parametrize("inference", [False, True])
def test_inference(inference):
    def run():
        net = layers(3, 8).to(OFFLOAD)
        with torch.inference_mode(inference), torch.no_grad():
            return [use(net, data(3, 8)) for _ in range(3)]

    both(run)


def test_a_copy_made_in_inference_mode_serves_training():
    def run():
        net, x = layers(3, 8).to(OFFLOAD), data(3, 8)
        with torch.inference_mode():
            first = [use(net, x) for _ in range(2)]
        y = use(net, x.requires_grad_())
        y.float().square().sum().backward()
        with torch.inference_mode():
            return first, y, use(net, x), x.grad, grads(net)

    both(run)


def test_weights_made_in_inference_mode():
    def run():
        with torch.inference_mode():
            net = layers(2, 8).to(OFFLOAD).requires_grad_(False)
        return [use(net, data(3, 8)) for _ in range(3)]

    both(run)


def test_frozen_weights_under_adapters():
    def run():
        base, down, up = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 4), nn.Linear(4, 64)
        for net in (base, down, up):
            net.to(OFFLOAD)
        optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            x = data(4, 64, seed=step).requires_grad_()
            with torch.autocast(COMPUTE.type, torch.bfloat16):
                y = base(x) + up(down(x))
            y.float().square().mean().backward()
            optimizer.step()
        return y, x.grad, list(up.parameters())

    both(run)


def test_a_copy_goes_with_its_weight():
    before = kept_bytes()
    layer = nn.Linear(64, 64, bias=False).to(OFFLOAD)
    for _ in range(2):
        use(layer, data(3, 64))
    assert kept_bytes() - before == 64 * 64 * (4 + 2)
    twin = copy.deepcopy(layer)
    assert kept_bytes() - before == 64 * 64 * (4 + 2 + 4)
    assert_same(twin.weight, layer.weight)
    del layer, twin
    assert kept_bytes() == before


def test_turned_off_copies_go_when_their_weight_is_updated():
    before = kept_bytes()
    layer = nn.Linear(512, 512, bias=False).to(OFFLOAD)
    for _ in range(2):
        use(layer, data(3, 512))
    torch_offload.set_autocast_copies(False)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert kept_bytes() - before == layer.weight.nbytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(64, 64, bias=False).to(OFFLOAD).share_memory(),
        lambda: nn.Linear(64, 64, bias=False).half().to(OFFLOAD),
    ],
    ids=["shared", "float16"],
)
def test_weights_that_have_no_copy(make):
    layer = make()
    before = kept_bytes()
    for _ in range(3):
        use(layer, data(3, 64))
    assert kept_bytes() == before


def test_only_large_weights_have_copies():
    torch_offload.set_autocast_copies(True)
    before = kept_bytes()
    small, large = nn.Linear(64, 512).to(OFFLOAD), nn.Linear(512, 512, bias=False).to(OFFLOAD)
    for _ in range(2):
        use(small, data(3, 64))
        use(large, data(3, 512))
    own = sum(p.nbytes for net in (small, large) for p in net.parameters())
    assert kept_bytes() - before == own + large.weight.nbytes // 2


@pytest.mark.skipif(not GPU, reason="CUDA graphs")
def test_a_graph_reads_the_weight():
    layer, x = nn.Linear(64, 64).to(OFFLOAD), data(3, 64)
    with torch.no_grad():
        for _ in range(3):
            use(layer, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = layer(x)
        layer.weight.copy_(at("cpu", 64, 64, seed=9))
        graph.replay()
        assert_same(y, use(layer, x))


def test_the_setting():
    torch_offload.set_autocast_copies(False)
    assert torch_offload.get_autocast_copies() is False
    torch_offload.set_autocast_copies(True)
    assert torch_offload.get_autocast_copies() is True
    says(
        TypeError,
        "copies are kept or they aren't; give True or False, not 1.",
        lambda: torch_offload.set_autocast_copies(1),
    )


def test_a_program_that_casts_by_itself_is_left_alone():
    layer = nn.Linear(64, 64, bias=False).to(OFFLOAD)
    before = kept_bytes()
    for _ in range(2):
        F.linear(data(3, 64).bfloat16(), layer.weight.bfloat16())
    assert kept_bytes() == before
