"""What autograd saves of fetched tensors: changes in between are noticed, values stay, and memory is released and refilled."""

import gc

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, HOST, OFFLOAD, assert_same, data, grads, layers, same, says


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


def test_in_place_on_an_activation_after_it_was_saved():
    for device in (COMPUTE, OFFLOAD):
        w = data(8, 8, device=device).requires_grad_()
        h = data(3, 8).requires_grad_() * 1
        y = F.linear(h, w)
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_tensor_saved_three_times():
    def run(device):
        w = data(8, 8, device=device).requires_grad_()
        y = w * w * w + w @ w
        z = data(8, 8, seed=1) * w * w
        (y.to(COMPUTE).sum() + z.sum()).backward()
        return y, z, w.grad

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


def test_abandoned_graphs():
    def run(device):
        net = layers(4).to(device)
        for k in range(5):
            net(data(3, 8, seed=k))
        net(data(3, 8)).square().mean().backward()
        return grads(net)

    same(run)


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
    torch.offload.set_budget(0)
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
        torch.offload.set_budget("auto")


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


OTHER_DATA = {
    "double": lambda layer: layer.double(),
    "half": lambda layer: layer.half(),
    "cpu": lambda layer: layer.cpu(),
    "zeros": lambda layer: setattr(layer.weight, "data", torch.zeros_like(layer.weight)),
    "smaller": lambda layer: setattr(layer.weight, "data", layer.weight.data[:2, :2].clone()),
}


@pytest.mark.memcheck
@pytest.mark.parametrize("change", OTHER_DATA.values(), ids=OTHER_DATA)
def test_backward_reads_what_the_forward_has_read(change):
    """A parameter that gets other memory in between, as from module.to(), is no other operand of what has been computed."""

    def run(device):
        layer = torch.nn.Linear(8, 8).to(device)
        x = data(4, 8).requires_grad_()
        y = layer(x)
        change(layer)
        return torch.autograd.grad(y.sum(), x)

    same(run)


SAVED = (
    "offload: this tensor is what an operation has saved of an offload operand, and it has memory only while its "
    "backward runs; read the operand itself, or run the forward in torch.autograd.graph.saved_tensors_hooks(lambda t: t, "
    "lambda t: t), which keeps it."
)
READS = {
    "print": repr,
    "sum": torch.sum,
    "clone": torch.clone,
    "write": lambda t: t.detach().fill_(1),
    "beside offload": lambda t: t + torch.ones(8, 8, device=OFFLOAD),
    "item": lambda t: t[0, 0].item(),
    "to offload": lambda t: t.to(OFFLOAD),
    "a view": lambda t: t.t().reshape(64).tolist(),
    "storage": lambda t: t.untyped_storage().tolist(),
    "address": torch.Tensor.data_ptr,
    "numpy": lambda t: t.detach().cpu().numpy(),
    "out": lambda t: torch.ones(8, 8, out=t.detach()),
}


def saved_weight(device, weight):
    x = data(3, 8).requires_grad_()
    y = x @ weight.to(device)
    return x, y, y.grad_fn._saved_mat2


@pytest.mark.skipif(HOST, reason="the host's bytes are used as they are")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_what_a_node_has_saved(read):
    weight = data(8, 8).to(OFFLOAD).requires_grad_()
    x, y, saved = saved_weight(OFFLOAD, weight)

    def is_refused():
        says(RuntimeError, SAVED, lambda: read(saved))

    is_refused()
    y.sum().backward(retain_graph=True)
    is_refused()
    first = x.grad.clone()
    y.sum().backward()
    assert_same(x.grad, first + first)
    is_refused()
    assert_same(weight.detach(), data(8, 8))


def test_saved_tensors_are_there_in_backward():
    def run(device):
        _, y, saved = saved_weight(device, data(8, 8).to(device).requires_grad_())
        seen = []
        y.grad_fn.register_prehook(lambda gradients: seen.append(saved.detach().clone()))
        y.sum().backward()
        return seen

    same(run)


def test_saved_tensors_are_kept_by_hooks():
    def run(device):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            _, _, saved = saved_weight(device, data(8, 8).to(device).requires_grad_())
        return saved.detach() * 2

    same(run)


def test_a_walk_over_all_that_is_saved():
    """As tools that draw a graph do it: sizes, dtypes, identities and views, but no values."""

    def run(device):
        net = layers(2).to(device)
        loss = F.layer_norm(net(data(3, 8)), (8,), data(8, device=device)).square().mean()
        seen, todo = [], [loss.grad_fn]
        while todo:
            node = todo.pop(0)
            for name in sorted(dir(node)):
                value = getattr(node, name) if name.startswith("_saved") else None
                if isinstance(value, torch.Tensor) and "Fetch" not in node.name():
                    view = value.unsqueeze(0).transpose(0, -1)
                    seen.append((name, value.dtype, value.device.type, tuple(value.shape), tuple(view.shape)))
            todo += [to for to, _ in node.next_functions if to is not None]
        loss.backward()
        return seen, grads(net)

    same(run)
