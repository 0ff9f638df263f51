"""``set_gpu_steps``: optimizers step on the device that computes, where what they need is in the cache."""

import copy
import gc
import os
import threading

import pytest
import torch
from helpers import CACHED, COMPUTE, GPU, assert_same, data, layers, says
from torch import nn

import torch_offload

cached = pytest.mark.skipif(not CACHED, reason="there is no cache")
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
}


@pytest.fixture(autouse=True)
def _gpu_steps():
    torch_offload.synchronize()
    torch_offload.set_gpu_steps(True)
    torch_offload.set_budget(1 << 30)
    yield
    torch_offload.synchronize()
    torch_offload.set_gpu_steps(False)
    torch_offload.set_budget("auto")


def stat(name):
    return torch_offload.memory_stats()[name]


def train(model, optimizer, steps, first=0, **zeroing):
    for step in range(first, first + steps):
        optimizer.zero_grad(**zeroing)
        model(data(4, 64, seed=step)).square().mean().backward()
        optimizer.step()


def same(actual, expected):
    """To the bit where the CPU plays the device's part; otherwise some steps are the host's, which rounds as it does.

    Adam's steps are of lr = 0.01 however small a gradient is, so they carry its rounding far: a hundredth of one is allowed.
    """
    actual, expected = [p.detach().cpu() for p in actual], [p.detach().cpu() for p in expected]
    if GPU:
        low = actual[0].dtype == torch.bfloat16
        torch.testing.assert_close(actual, expected, rtol=0.02 if low else 1e-4, atol=1e-3 if low else 1e-4)
    else:
        assert_same(actual, expected)


def same_state(optimizer, truth, check):
    states = [o.state_dict()["state"].values() for o in (optimizer, truth)]
    for ours, theirs in zip(*states, strict=True):
        check([value.cpu() for value in ours.values()], [value.cpu() for value in theirs.values()])


@pytest.mark.memcheck
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values(name):
    plain = layers(3, 64).to(COMPUTE)
    model = copy.deepcopy(plain).to("offload")
    truth, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    for group in truth.param_groups:
        group["foreach"] = False
    train(plain, truth, 6)
    train(model, optimizer, 6)
    # SGD makes its state of the first gradient, and that step is the host's.
    check = same if name == "SGD" else assert_same
    check([p.detach().cpu() for p in model.parameters()], [p.detach().cpu() for p in plain.parameters()])
    same_state(optimizer, truth, check)


@cached
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="nothing stays")
def test_nothing_is_done_on_the_host_and_nothing_comes_back():
    model = layers(3, 64).to("offload")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, 3)
    torch_offload.synchronize()
    jobs, down, home = stat("host_jobs.submitted"), stat("link.bytes_to_device"), stat("link.bytes_to_host")
    updates = stat("cache.updates")
    train(model, optimizer, 4)
    torch_offload.synchronize()
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert stat("cache.updates") - updates == 4 * len(list(model.parameters()))
    assert stat("host_jobs.submitted") == jobs
    assert stat("link.bytes_to_device") == down
    assert stat("link.bytes_to_host") - home == 4 * 3 * size  # parameters and two states, and no gradient


@cached
def test_without_room_the_host_steps():
    torch_offload.set_budget(0)
    model = layers(3, 64).to("offload")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    plain = copy.deepcopy(model).to(COMPUTE)
    jobs = stat("host_jobs.submitted")
    train(model, optimizer, 3)
    train(plain, OPTIMIZERS["AdamW"](plain.parameters()), 3)
    same(model.parameters(), plain.parameters())
    assert stat("host_jobs.submitted") - jobs in (0, 3 * len(list(model.parameters())))  # none where it is done at once


@cached
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="nothing stays")
@pytest.mark.parametrize("weights", [1, 1.5, 2.5, 3, 4])
def test_weights_come_first(weights):
    """By budgets of so many times the weights: the room beside these is for as many gradients and states as fit."""
    gc.collect()  # what other tests have left has a part in the plan
    torch_offload.empty_cache()
    count, width, steps = 8, 64, 4
    size = 4 * width**2
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)]).to("offload")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    torch_offload.set_budget(int((weights * count + 0.5) * size))
    # Where guesses of tests before were wrong, up to 1,024 fetches must come as expected until the next is made.
    train(model, optimizer, 1024 // (2 * count) + 12)
    torch_offload.synchronize()
    before = {name: stat(name) for name in ("cache.updates", "link.bytes_to_device", "link.bytes_to_host")}
    train(model, optimizer, steps)
    torch_offload.synchronize()
    there = int((weights - 1) * count / 3)
    assert stat("cache.updates") - before["cache.updates"] == steps * there
    assert stat("link.bytes_to_device") - before["link.bytes_to_device"] == steps * (count - there) * size
    assert stat("link.bytes_to_host") - before["link.bytes_to_host"] == steps * (3 * there + count - there) * size


@cached
def test_a_budget_that_changes():
    model = layers(3, 64).to("offload")
    plain = copy.deepcopy(model).to(COMPUTE)
    optimizer, truth = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["AdamW"](plain.parameters())
    for step, budget in enumerate([1 << 30, 0, 1 << 30, 1 << 17, 1 << 16, 1 << 30]):
        torch_offload.set_budget(budget)
        train(model, optimizer, 2, 2 * step)
        train(plain, truth, 2, 2 * step)
        same(model.parameters(), plain.parameters())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_algorithms_of_lists_and_fused_ones_are_the_hosts(options):
    model = layers(3, 64).to("offload")
    plain = copy.deepcopy(model).to("cpu")
    updates = stat("cache.updates") if CACHED else 0
    for net in (model, plain):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **options)
        for step in range(3):
            for parameter in net.parameters():
                parameter.grad = data(*parameter.shape, seed=step).to(parameter.device)
            optimizer.step()
    assert_same([p.detach().cpu() for p in model.parameters()], [p.detach() for p in plain.parameters()])
    assert not CACHED or stat("cache.updates") == updates


def test_on_and_off():
    model = layers(3, 64).to("offload")
    plain = copy.deepcopy(model).to(COMPUTE)
    optimizer, truth = OPTIMIZERS["AdamW"](model.parameters()), OPTIMIZERS["AdamW"](plain.parameters())
    for step in range(6):
        torch_offload.set_gpu_steps(step % 3 != 1)
        train(model, optimizer, 1, step, set_to_none=step % 2 == 0)
        train(plain, truth, 1, step)
    same(model.parameters(), plain.parameters())
    same_state(optimizer, truth, same)


def test_gradients_that_are_clipped_scaled_and_looked_at():
    model = layers(3, 64).to("offload")
    plain = copy.deepcopy(model).to(COMPUTE)
    results = []
    for net in (model, plain):
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01), foreach=False if net is plain else None)
        scaler, seen = torch.amp.GradScaler(COMPUTE.type, init_scale=256.0), []
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            with torch_offload.saved_tensors(min_bytes=0):
                loss = net(data(4, 64, seed=step)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
            seen.append(next(net.parameters()).grad.to("cpu", copy=True))
            scaler.step(optimizer)
            scaler.update()
        results.append([*seen, *net.parameters()])
    for ours, theirs in zip(*results, strict=True):
        same([torch.as_tensor(ours)], [torch.as_tensor(theirs)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_and_layouts(dtype):
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3)).to(dtype).to(memory_format=torch.channels_last)
    plain, model = copy.deepcopy(net).to(COMPUTE), net.to("offload")
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            each(data(2, 8, 8, 8, seed=step).to(dtype)).square().mean().backward()
            optimizer.step()
    same(model.parameters(), plain.parameters())


@cached
def test_a_result_that_somebody_keeps():
    """A parameter that an operation made has the memory of its result, which others may look at."""
    weight = nn.Parameter((data(64, 64).to("offload") * 2).detach())
    kept = weight.detach().to(COMPUTE)
    value = kept.clone()
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    for _ in range(2):
        weight.sum().item()  # which sends it home
        weight.grad = torch.ones(64, 64).to("offload")
        optimizer.step()
    assert_same(kept, value)


def test_a_graph_whose_weights_have_changed_is_refused():
    model = layers(3, 64).to("offload")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    loss = model(data(4, 64)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_threads():
    """A model each, in one cache that has room for less than both."""
    torch_offload.set_budget(1 << 17)
    plain = layers(3, 64).to(COMPUTE)
    models = [copy.deepcopy(plain).to("offload") for _ in range(2)]

    def run(model):
        train(model, OPTIMIZERS["AdamW"](model.parameters()), 6)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(plain)
    for model in models:
        same(model.parameters(), plain.parameters())


@cached
def test_a_weight_that_somebody_keeps():
    """What has been fetched of it is what it was; so the host steps."""
    weight = nn.Parameter(data(64, 64).to("offload"))
    before = weight.detach().cpu()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for _ in range(2):
        weight.grad = torch.ones(64, 64).to("offload")
        with torch.no_grad():
            kept = torch.ops.offload.fetch(weight, torch.device(COMPUTE.type, 0))
        value = kept.clone()
        optimizer.step()
        assert_same(kept, value)
    assert_same(weight.detach().cpu(), before - 0.5 - 0.5)


def test_parameters_of_one_storage():
    flat = torch.randn(2, 64, 64)
    ours = flat.clone().to("offload")
    plain = [nn.Parameter(flat[k].clone()) for k in range(2)]
    parameters = [nn.Parameter(ours[k]) for k in range(2)]
    for each, other in zip(parameters, plain, strict=True):
        other.grad = torch.full((64, 64), 0.25)
        each.grad = other.grad.to("offload")
    torch.optim.AdamW(parameters, lr=0.1).step()
    torch.optim.AdamW(plain, lr=0.1).step()
    same(parameters, plain)


def test_saving_and_loading_between_steps(tmp_path):
    model = layers(2, 64).to("offload")
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    train(model, optimizer, 2, 2)
    again = layers(2, 64).to("offload")
    optimizer_again = OPTIMIZERS["AdamW"](again.parameters())
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    optimizer_again.load_state_dict(saved["optimizer"])
    train(again, optimizer_again, 2, 2)
    same(again.parameters(), model.parameters())


def test_the_setting():
    assert torch_offload.get_gpu_steps() is True
    sentence = "optimizers step on the GPU or they don't; give True or False, not 1."
    says(TypeError, sentence, lambda: torch_offload.set_gpu_steps(1))
    torch_offload.set_gpu_steps(False)
    assert torch_offload.get_gpu_steps() is False
