"""Autograd across the fetch: what is saved is released and refilled, and gradients arrive where the parameters are."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, CPU, HOST, OFFLOAD, SIM, grads, same
from torch import nn


def layers(count=4, width=8):
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())])


def data(*shape, device=COMPUTE, seed=7):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.memcheck
def test_many_layers():
    def run(device):
        net = layers(8).to(device)
        x = data(3, 8).requires_grad_()
        y = net(x)
        y.square().mean().backward()
        return y, x.grad, grads(net)

    same(run)


def test_weight_used_twice():
    def run(device):
        layer = nn.Linear(8, 8).to(device)
        x = data(3, 8).requires_grad_()
        y = layer(layer(x).tanh())
        y.square().sum().backward()
        return y, x.grad, grads(layer)

    same(run)


def test_weight_used_twice_in_one_operation():
    def run(device):
        weight = data(8, 8, device=device).requires_grad_()
        x = data(3, 8)
        y = x @ torch.cat([weight, weight, weight.t()], dim=1)
        y.square().sum().backward()
        z = torch.addmm(weight, weight, x.new_ones(8, 8))
        z.square().sum().backward()
        return y, z, weight.grad

    same(run)


@pytest.mark.parametrize("times", [2, 4])
def test_gradient_accumulation(times):
    def run(device):
        net = layers().to(device)
        for k in range(times):
            net(data(3, 8, seed=k)).square().mean().backward()
        return grads(net)

    same(run)


def test_gradients_are_read_at_once():
    def run(device):
        net = layers().to(device)
        net(data(3, 8)).square().mean().backward()
        items = [p.grad.sum().item() for p in net.parameters()]
        arrays = [torch.from_numpy(p.grad.cpu().numpy()) for p in net.parameters()]
        return items, arrays

    same(run)


def test_retain_graph():
    def run(device):
        net = layers().to(device)
        x = data(3, 8).requires_grad_()
        loss = net(x).square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return x.grad, grads(net)

    same(run)


def test_two_losses_of_one_forward():
    def run(device):
        net = layers().to(device)
        h = net(data(3, 8))
        h.mean().backward(retain_graph=True)
        h.square().sum().backward()
        return grads(net)

    same(run)


@pytest.mark.parametrize("order", [2, 3])
def test_create_graph(order):
    def run(device):
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(device)
        x = data(3, 4).requires_grad_()
        y = net(x).sum()
        for _ in range(order - 1):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
            y = y.square().sum()
        y.backward()
        return y, x.grad, grads(net)

    same(run)


def test_gradient_penalty_in_parameters():
    """Gradients of parameters' gradients: these are computed from offload tensors."""

    def run(device):
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(device)
        x = data(3, 4)
        first = torch.autograd.grad(net(x).sum(), list(net.parameters()), create_graph=True)
        for gradient, parameter in zip(first, net.parameters(), strict=True):
            assert gradient.device == parameter.device
        sum(g.square().sum() for g in first).backward()
        return first, grads(net)

    same(run)


def test_autograd_grad():
    def run(device):
        net = layers().to(device)
        x = data(3, 8).requires_grad_()
        found = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
        assert found[0].device == COMPUTE
        assert all(p.grad is None for p in net.parameters())
        return found

    same(run)


def test_autograd_grad_of_some():
    def run(device):
        net = layers().to(device)
        unused = data(3, device=device).requires_grad_()
        return torch.autograd.grad(
            net(data(3, 8)).sum(), [net[0].weight, unused], allow_unused=True, materialize_grads=True
        )

    same(run)


def test_frozen_weights_get_no_gradient():
    def run(device):
        net = layers().to(device)
        for parameter in net[2].parameters():
            parameter.requires_grad_(False)
        x = data(3, 8).requires_grad_()
        net(x).square().mean().backward()
        assert net[2].weight.grad is None
        return x.grad, grads(net)

    same(run)


def test_nothing_is_recorded_for_an_all_frozen_model():
    net = layers().to(OFFLOAD).requires_grad_(False)
    y = net(data(3, 8))
    assert not y.requires_grad
    assert y.grad_fn is None


@pytest.mark.parametrize("way", ["in place", "data", "optimizer", "copy_"])
def test_weight_changed_between_forward_and_backward(way):
    def run(device):
        net = layers(2).to(device)
        loss = net(data(3, 8).requires_grad_()).square().mean()
        weight = net[2].weight
        if way == "data":
            weight.data.mul_(1.0)  # unseen by autograd, on every device; the values are the same
            loss.backward()
            return grads(net)
        with torch.no_grad():
            if way == "in place":
                weight.mul_(2.0)
            elif way == "copy_":
                weight.copy_(torch.zeros(8, 8))
            else:
                weight.grad = torch.zeros_like(weight)
                torch.optim.SGD([weight], lr=1.0).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return None

    same(run)


def test_changed_after_it_was_saved_in_a_generic_operation():
    def run(device):
        scale = data(8, device=device).requires_grad_()
        y = (data(3, 8).requires_grad_() * scale).sum()
        with torch.no_grad():
            scale.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    same(run)


def test_hooks_of_tensors():
    def run(device):
        net = layers(2).to(device)
        seen = []
        for parameter in net.parameters():

            def hook(gradient, parameter=parameter):
                assert gradient.device == parameter.device
                seen.append(gradient.clone())
                return gradient * 2

            parameter.register_hook(hook)
        net(data(3, 8)).square().mean().backward()
        return seen, grads(net)

    same(run)


def test_hooks_of_modules():
    def run(device):
        net = layers(2).to(device)
        seen = []
        net[2].register_forward_hook(lambda m, i, o: o * 2)
        net[2].register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
        net[0].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
        net[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        net(data(3, 8)).square().mean().backward()
        return seen, grads(net)

    same(run)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_optimizer_steps_inside_backward(optimizer):
    """register_post_accumulate_grad_hook: each weight is stepped as soon as its gradient is there."""

    def run(device):
        net = layers(4).to(device)
        each = {p: optimizer([p], lr=0.5) for p in net.parameters()}

        def step(parameter):
            each[parameter].step()
            each[parameter].zero_grad()

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        losses = []
        for k in range(3):
            loss = net(data(3, 8, seed=k)).square().mean()
            loss.backward()
            losses.append(loss)
        assert all(p.grad is None for p in net.parameters())
        return losses, list(net.parameters())

    same(run, truth=CPU if HOST or SIM else COMPUTE)


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


def test_explicit_fetch_is_the_users():
    """``w.to(x.device)`` stays what it was, however much is fetched after it."""

    def run(device):
        weights = [data(64, 64, device=device, seed=k).requires_grad_() for k in range(12)]
        held = [w.to(COMPUTE) for w in weights]
        x = data(3, 64)
        for weight in weights:
            x = F.linear(x, weight).tanh()
        for weight in held:
            x = (x @ weight).tanh()
        x.sum().backward()
        return x, held, [w.grad for w in weights]

    same(run)


def test_views_of_a_weight():
    def run(device):
        weight = data(8, 8, device=device).requires_grad_()
        x = data(3, 4)
        y = x @ weight[:4].t()[:4] + (x * weight[1, ::2]) + x * weight.diagonal()[4:]
        q, k = weight.chunk(2)
        y = y + x @ q[:, :4] + x @ k.narrow(1, 2, 4)
        y.square().sum().backward()
        return y, weight.grad

    same(run)


def test_output_is_a_view_of_a_fetched_tensor():
    """Operations that hand their operand on, as expand does: the memory must not be taken away under the result."""

    def run(device):
        weight = data(4, 8, device=device).requires_grad_()
        scale = data(4, 8).requires_grad_()
        shown, _ = torch.broadcast_tensors(weight, scale)
        y = shown.to(COMPUTE) * scale
        z = weight.to(COMPUTE).view(8, 4).t()
        (y.sum() + z.square().sum()).backward()
        return y, z, weight.grad, scale.grad

    same(run)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_residual_connection(feed):
    """A gradient that flows on along two ways, and that a hook keeps, is not what the sum of both is written into."""

    def run(device):
        place = device if feed == "offload" else COMPUTE
        x = data(3, 8, device=place).requires_grad_()
        kept = []
        h = x * 2
        layer = nn.Linear(8, 8).to(device)
        for _ in range(3):
            h = h + layer(h).tanh()
            h.register_hook(kept.append)
            h = h.tanh() + h
            h.register_hook(kept.append)
            h.retain_grad()
            kept.append(h)
        start = data(3, 8, device=place, seed=3)
        h.backward(start)
        return x.grad, start, [t if t.grad_fn is None else t.grad for t in kept], grads(layer)

    same(run)


def test_gradient_of_a_non_leaf():
    def run(device):
        weight = data(8, 8, device=device).requires_grad_()
        scaled = weight * 0.5
        assert scaled.device.type == device.type
        scaled.retain_grad()
        y = F.linear(data(3, 8), scaled)
        y.square().sum().backward()
        assert scaled.grad.device == scaled.device
        return scaled.grad, weight.grad

    same(run)


def test_arithmetic_between_offload_tensors():
    def run(device):
        a = data(6, 6, device=device).requires_grad_()
        b = data(6, 6, device=device, seed=1).requires_grad_()
        y = ((a @ b).softmax(-1) * a.exp() + b.t()).sum()
        assert y.device.type == device.type
        y.backward()
        return y, a.grad, b.grad

    same(run)


def test_in_place_on_the_way():
    def run(device):
        layer = nn.Linear(8, 8).to(device)
        bias = data(8, device=device).requires_grad_()
        h = layer(data(3, 8))
        h.add_(bias)
        h.mul_(bias)
        h.relu_()
        h.square().sum().backward()
        return h, bias.grad, grads(layer)

    same(run)


def test_in_place_between_offload_tensors_with_a_gradient():
    def run(device):
        weight = data(8, 8, device=device).requires_grad_()
        scale = data(8, device=device, seed=1).requires_grad_()
        work = weight.clone()
        work.mul_(scale)
        work[2:4] = scale
        work.t().add_(scale)
        y = F.linear(data(3, 8), work)
        y.square().sum().backward()
        return work, y, weight.grad, scale.grad

    same(run)


def test_plain_tensor_written_into_an_offload_one():
    def run(device):
        target = torch.zeros(4, 8, device=device)
        source = data(8).requires_grad_()
        target[1] = source
        target[2:].copy_(source.expand(2, 8))
        (target * 2).sum().backward()
        assert source.grad.device == COMPUTE
        return target, source.grad

    same(run)


def test_to_and_back_is_differentiable():
    def run(device):
        x = data(3, 8).requires_grad_()
        y = x.to(device).to(COMPUTE).to(device, torch.float64).to(COMPUTE)
        y.square().sum().backward()
        assert x.grad.device == COMPUTE
        return y, x.grad

    same(run)


def test_tensor_saved_three_times():
    def run(device):
        w = data(8, 8, device=device).requires_grad_()
        y = w * w * w + w @ w
        z = data(8, 8, seed=1) * w * w
        (y.to(COMPUTE).sum() + z.sum()).backward()
        return y, z, w.grad

    same(run)


def test_slices_that_overlap():
    def run(device):
        w = data(10, 8, device=device).requires_grad_()
        x = data(3, 8)
        h = sum((x @ w[k : k + 5].t()).tanh() for k in range(6))
        h.square().sum().backward()
        return h, w.grad

    same(run)


def test_in_place_on_an_activation_after_it_was_saved():
    for device in (COMPUTE, OFFLOAD):
        w = data(8, 8, device=device).requires_grad_()
        h = data(3, 8).requires_grad_() * 1
        y = F.linear(h, w)
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_gradient_set_and_changed_by_hand(feed):
    def run(device):
        layer = nn.Linear(8, 8).to(device)
        place = device if feed == "offload" else COMPUTE
        layer.weight.grad = torch.ones(8, 8, device=device)
        for k in range(3):
            layer(data(3, 8, device=place, seed=k)).square().sum().backward()
            layer.weight.grad *= 0.5
            layer.weight.grad[0] = 0
            layer.bias.grad = layer.bias.grad.clone() + 1
        return grads(layer)

    same(run)


def test_set_detach_under_the_same_name():
    def run(device):
        w = data(8, 8, device=device).requires_grad_()
        state = torch.zeros(3, 8).to(COMPUTE)
        losses = []
        for k in range(3):  # truncated backpropagation through time
            state = (state.detach() + data(3, 8, seed=k) @ w).tanh()
            loss = state.square().mean()
            loss.backward()
            losses.append(loss)
        return losses, w.grad

    same(run)


def test_gradients_through_where_and_indexing_of_weights():
    def run(device):
        table = data(9, 8, device=device).requires_grad_()
        index = torch.tensor([1, 3, 1, 8]).to(COMPUTE)
        x = data(4, 8)
        y = (
            torch.where(x > 0, table[index] * x, table[0])
            + table.index_select(0, index)
            + table.gather(0, index[:, None])
        )
        y.square().sum().backward()
        return y, table.grad

    same(run)


def test_inputs_argument_of_backward():
    def run(device):
        net = layers(3).to(device)
        x = data(3, 8).requires_grad_()
        net(x).square().mean().backward(inputs=[net[2].weight])
        assert x.grad is None
        assert net[0].weight.grad is None
        return net[2].weight.grad

    same(run)


def test_threads_on_one_model():
    def run(device):
        net = layers(4).to(device)
        results: dict[int, object] = {}

        def work(k):
            x = data(3, 8, seed=k).requires_grad_()
            found = torch.autograd.grad(net(x).square().mean(), [x, *net.parameters()])
            results[k] = found

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[k] for k in range(4)]

    if SIM:
        pytest.skip("the simulated link is one thread's by design")
    same(run)


def test_backward_in_another_thread():
    def run(device):
        net = layers(4).to(device)
        loss = net(data(3, 8)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return grads(net)

    same(run)


def test_two_models_interleaved():
    def run(device):
        one, two = layers(4).to(device), layers(4).to(device)
        x = data(3, 8)
        a = one(x).square().mean()
        b = two(x).square().mean()
        c = one(two(x)).square().mean()
        b.backward()
        c.backward()
        a.backward()
        return grads(one), grads(two)

    same(run)


def test_exception_in_forward():
    def run(device):
        net = layers(4).to(device)
        x = data(3, 8)
        handle = net[4].register_forward_pre_hook(lambda m, i: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(x)
        handle.remove()
        net(x).square().mean().backward()
        return grads(net)

    same(run)


def test_exception_in_backward():
    def run(device):
        net = layers(4).to(device)
        x = data(3, 8)
        handle = net[4].weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(x).square().mean().backward()
        handle.remove()
        net.zero_grad()
        net(x).square().mean().backward()
        return grads(net)

    same(run)


def test_abandoned_graphs():
    def run(device):
        net = layers(4).to(device)
        for k in range(5):
            net(data(3, 8, seed=k))
        net(data(3, 8)).square().mean().backward()
        return grads(net)

    same(run)


def test_detach_and_requires_grad():
    weight = data(4, 4, device=OFFLOAD).requires_grad_()
    shared = weight.detach()
    assert not shared.requires_grad
    assert shared.data_ptr() == weight.data_ptr()
    assert weight.is_leaf
    assert weight.grad_fn is None
    assert not weight.data.requires_grad


def test_gradient_takes_the_layout_of_its_parameter():
    def run(device):
        weight = data(4, 6, device=device).t().requires_grad_()
        assert weight.is_leaf
        F.linear(data(3, 4), weight).square().sum().backward()
        return weight.grad, weight.grad.stride()

    same(run)


def test_anomaly_mode():
    def run(device):
        net = layers(2).to(device)
        with torch.autograd.detect_anomaly(check_nan=True):
            net(data(3, 8)).square().mean().backward()
        return grads(net)

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        same(run)


def test_forward_mode():
    def run(device):
        layer = nn.Linear(8, 8).to(device)
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(data(3, 8), data(3, 8, seed=1))
            primal, tangent = torch.autograd.forward_ad.unpack_dual(layer(x))
        return primal, tangent

    same(run)


@pytest.mark.gpu
def test_side_streams_and_another_thread():
    """Forward on stream A, backward from another thread, the caller on stream B."""
    net = layers(6, 64).to(OFFLOAD)
    plain = layers(6, 64)
    plain.load_state_dict(net.state_dict())
    plain.cuda()
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    for k in range(10):
        x = data(32, 64, seed=k)
        a.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(a):
            loss = net(x).square().mean()
        b.wait_stream(a)
        with torch.cuda.stream(b):
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            found = [p.grad.to("cuda") for p in net.parameters()]
        torch.cuda.current_stream().wait_stream(b)
        plain(x).square().mean().backward()
        for gradient, q in zip(found, plain.parameters(), strict=True):
            assert torch.equal(gradient, q.grad)
        net.zero_grad()
        plain.zero_grad()


@pytest.mark.gpu
def test_fetched_on_one_stream_and_used_on_another():
    weight = data(512, 512, device=OFFLOAD)
    expected = weight.cpu()
    side = torch.cuda.Stream()
    for _ in range(20):
        fetched = weight.to("cuda", non_blocking=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = fetched * 1
            fetched.record_stream(side)
        del fetched
        for k in range(4):
            data(512, 512, device=OFFLOAD, seed=k).to("cuda")
        side.synchronize()
        assert torch.equal(copy.cpu(), expected)


@pytest.mark.skipif(HOST, reason="there is no cache")
@pytest.mark.parametrize("generic", [False, True], ids=["linear", "generic"])
def test_memory_is_released_after_each_operation(generic):
    width, count = 256, 24
    net = layers(count, width).to(OFFLOAD)
    scales = [data(width, width, device=OFFLOAD, seed=k).requires_grad_() for k in range(count)]
    size = width * width * 4
    before = torch.offload.get_ring_bytes()
    gc.collect()
    held = torch.offload.memory_stats()["device.pinned_slot_bytes.current"]
    torch.offload.empty_cache()
    torch.offload.set_ring_bytes(2 * size)
    torch.offload.reset_peak_memory_stats()
    try:
        x = data(width, width)
        if generic:
            for scale in scales:
                x = (x * scale).tanh()
        else:
            x = net(x)
        stats = torch.offload.memory_stats()
        assert stats["device.pinned_slot_bytes.current"] - held <= size
        assert stats["device.slot_bytes.peak"] - held <= 5 * size
        x.square().mean().backward()
        del x
        stats = torch.offload.memory_stats()
        assert stats["device.pinned_slot_bytes.current"] == held
        assert stats["device.slot_bytes.peak"] - held <= 8 * size
    finally:
        torch.offload.set_ring_bytes(before)


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_nothing_stays_pinned_after_abandoned_work():
    gc.collect()
    held = torch.offload.memory_stats()["device.pinned_slot_bytes.current"]
    net = layers(6, 64).to(OFFLOAD)
    for _ in range(3):
        net(data(3, 64))
    loss = net(data(3, 64)).sum()
    loss.backward(retain_graph=True)
    del loss
    gc.collect()
    assert torch.offload.memory_stats()["device.pinned_slot_bytes.current"] == held
