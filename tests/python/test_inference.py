"""Without gradients: no_grad, inference_mode, eval."""

import pytest
import torch
from compiling import BACKENDS
from helpers import COMPUTE, HOST, OFFLOAD, assert_same, at, same
from torch import nn


def model():
    return nn.Sequential(
        nn.Conv1d(3, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.GELU(),
        nn.Linear(8, 6),
        nn.LayerNorm(6),
        nn.Dropout(),
        nn.Linear(6, 2),
    ).eval()


@pytest.mark.memcheck
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_forward(context, feed, requires_grad):
    def run(device):
        net = model().requires_grad_(requires_grad).to(device)
        x = torch.randn(2, 3, 8).to(device if feed == "offload" else COMPUTE)
        with context():
            first, second = net(x), net(x)
        assert not first.requires_grad
        assert first.is_inference() == (context is torch.inference_mode)
        return first, second

    same(run)


WRITES = {
    "add_": lambda t: t.add_(1),
    "beside a plain tensor": lambda t: t.mul_(torch.ones(3)),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0]), 1.0),
    "out": lambda t: torch.add(torch.ones(3), 1, out=t),
    "a list": lambda t: torch._foreach_add_([t], 1),
    "a list of zeros": lambda t: torch._foreach_zero_([t]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("born", ["host", "device"])
def test_tensors_of_inference_mode_are_not_written_outside_of_it(write, born):
    with torch.inference_mode():
        t = at(OFFLOAD, 3) if born == "host" else at(OFFLOAD, 3) * 1
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        write(t)
    assert_same(t, at(OFFLOAD, 3))
    with torch.inference_mode():
        t.add_(1)
    assert_same(t, at(OFFLOAD, 3) + 1)


def test_tensors_made_in_inference_mode():
    def run(device):
        with torch.inference_mode():
            w = torch.randn(4, 4).to(device)
            x = torch.randn(3, 4).to(COMPUTE)
            y = x @ w
            w.mul_(2)
            w[0] = 1
            z = x @ w
            v = w.t()[1:] + 1
        assert w.is_inference()
        assert v.is_inference()
        outside = x @ w  # reading is allowed
        return y, z, v, outside

    same(run)


class Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x + w

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.sum(0)


USES = {
    "linear": lambda x, m: m(x),
    "without a bias": lambda x, m: nn.functional.linear(x, m.weight),
    "mm": lambda x, m: x @ m.weight,
    "add": lambda x, m: x + m.bias,
    "conv": lambda x, m: nn.functional.conv1d(x[:, :, None], m.weight[:, :, None], m.bias),
    "embedding": lambda x, m: nn.functional.embedding(x.argmax(1), m.weight),
    "norm": lambda x, m: nn.functional.batch_norm(x, m.bias.detach(), m.bias.detach().abs(), m.bias),
    "scaled": lambda x, m: m.weight * 2,
    "sum": lambda x, m: m.weight.sum(),
    "clone": lambda x, m: m.weight.clone().exp(),
    "function": lambda x, m: Adds.apply(x, m.bias),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_module_made_in_inference_mode_is_trained_outside(use, x_grad, autocast):
    """Where PyTorch computes its gradients, there are the same; where it refuses, its error."""

    def run(device):
        with torch.inference_mode():
            net = nn.Linear(4, 4).to(device)
        x = at("cpu", 3, 4).to(COMPUTE).requires_grad_(x_grad)
        said = result = None
        try:
            with torch.autocast(COMPUTE.type, torch.bfloat16, enabled=autocast):
                result = USES[use](x, net)
            if result.requires_grad:
                result.float().square().sum().backward()
        except RuntimeError as error:
            said = str(error)
        return said, result, result is not None and result.requires_grad, net.weight.grad, net.bias.grad, x.grad

    same(run)


def test_an_inference_tensor_can_not_be_saved_for_backward():
    for device in (COMPUTE, OFFLOAD):
        with torch.inference_mode():
            w = torch.ones(3, device=device)
        x = torch.ones(3, device=COMPUTE, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
            (x * w).sum().backward()
        with pytest.raises(RuntimeError, match=r"[Ii]nplace update to inference tensor"):
            w.add_(1)


def test_parameters_written_in_inference_mode():
    def run(device):
        layer = nn.Linear(4, 4).to(device)
        x = torch.randn(3, 4).to(COMPUTE)
        before = layer(x)
        with torch.inference_mode():
            layer.weight.mul_(2)
            inside = layer(x)
        after = layer(x)
        after.sum().backward()
        return before, inside, after, layer.weight.grad

    same(run)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [True, False])
def test_algorithms_are_chosen_by_the_weights_gradient(mode, bias):
    """matmul folds a batch whose rows lie apart only where the weight requires no gradient, and sums in another order then."""

    def run(device):
        layer = nn.Linear(10, 3, bias=bias).to(device)
        x = torch.randn(4, 4, 10).to(COMPUTE).transpose(0, 1)
        with mode():
            rows = torch.nn.functional.embedding(torch.tensor([0]).to(COMPUTE), layer.weight)
            return layer(x), torch.matmul(x, layer.weight.t()), rows

    same(run)


class CountsIn(torch.autograd.Function):
    """Writes to an operand that outlives the mode, by a view or marked as what it returns, or not."""

    @staticmethod
    def forward(ctx, x, seen, how):
        if how == "marked":
            ctx.mark_dirty(seen)
        if how == "out":
            torch.add(seen, 1, out=seen)
        elif how == "part":
            seen[1:].add_(1)
        else:
            seen.add_(1)
        return (x * 2, seen) if how == "marked" else x * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", ["whole", "part", "out", "marked"])
@pytest.mark.parametrize("kind", ["buffer", "parameter", "view", "view made within"])
def test_a_functions_writes_to_what_was_made_outside_come_home(mode, how, kind):
    def run(device):
        whole = torch.arange(6.0).to(device)
        written = nn.Parameter(whole) if kind == "parameter" else whole[1:5] if kind == "view" else whole
        with mode():
            operand = written[2:] if kind == "view made within" else written
            CountsIn.apply(torch.ones(3).to(COMPUTE), operand, how)
            beside = torch.zeros(()).to(COMPUTE) + written  # as the device has it
        versions = written._version
        return [beside, written.detach().cpu(), whole.cpu(), written.detach() * 2, versions]

    same(run)


def test_no_grad_then_training():
    def run(device):
        layer = nn.Linear(4, 4).to(device)
        x = torch.randn(3, 4).to(COMPUTE)
        with torch.no_grad():
            a = layer(x)
        with torch.inference_mode():
            b = layer(x)
        c = layer(x)
        c.square().sum().backward()
        return a, b, c, layer.weight.grad

    same(run)


def test_greedy_decoding_with_a_cache():
    """Keys and values grow by cat; the input follows the model's device, as transformers' generate() does."""

    def run(device):
        embedding, qkv, head = nn.Embedding(11, 8).to(device), nn.Linear(8, 24).to(device), nn.Linear(8, 11).to(device)
        token = torch.tensor([[3]]).to(device)
        keys = values = None
        out = [token]
        with torch.no_grad():
            for _ in range(6):
                q, k, v = qkv(embedding(token)).chunk(3, -1)
                keys = k if keys is None else torch.cat([keys, k], 1)
                values = v if values is None else torch.cat([values, v], 1)
                h = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
                token = head(h).argmax(-1)
                out.append(token)
        assert token.device.type == device.type
        return torch.cat(out, 1), keys, values

    same(run)


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_nothing_stays_pinned():
    before = torch.offload.memory_stats()["device.pinned_slot_bytes.current"]
    net = model().to(OFFLOAD)
    with torch.inference_mode():
        net(torch.randn(2, 3, 8).to(COMPUTE))
    assert torch.offload.memory_stats()["device.pinned_slot_bytes.current"] == before


def test_large_weight_sliced():
    def run(device):
        table = torch.arange(4096.0).view(64, 64).to(device)
        x = torch.randn(2, 64).to(COMPUTE)
        with torch.no_grad():
            return [x @ table[k : k + 3].t() for k in range(0, 60, 7)]

    same(run)


def test_set_grad_enabled_as_a_function():
    layer = nn.Linear(4, 4).to(OFFLOAD)
    previous = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    try:
        assert not layer(torch.ones(1, 4, device=COMPUTE)).requires_grad
    finally:
        torch.set_grad_enabled(previous)
    assert layer(torch.ones(1, 4, device=COMPUTE)).requires_grad


def test_values_survive_the_model():
    layer = nn.Linear(64, 64).to(OFFLOAD)
    x = torch.ones(2, 64, device=COMPUTE)
    with torch.no_grad():
        y = layer(x)
        w = layer.weight.to(COMPUTE)
        expected = y.clone(), w.clone()
        del layer
        for _ in range(4):
            torch.nn.Linear(64, 64).to(OFFLOAD)(x)
    assert_same((y, w), expected)


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_inside_of_what_is_compiled(backend):
    """As a decorator, as a region, and around another mode."""

    def run(device):
        torch.compiler.reset()
        w = at(device, 8, 8)

        @torch.inference_mode()
        def decorated(x):
            return (x @ w).relu()

        def region(x):
            before = x @ w
            with torch.inference_mode():
                within = before * 2 + w[0]
                with torch.inference_mode(False):
                    normal = within + 1
            return before.sin() + w, within, normal

        x = at(COMPUTE, 4, 8, seed=1)[:, :8]
        x = torch.cat([x, x])
        results = [torch.compile(decorated, backend=backend)(x)]
        results += torch.compile(region, backend=backend, fullgraph=True)(x)
        return results, [result.is_inference() for result in results]

    (actual, modes), (expected, expected_modes) = run(OFFLOAD), run(COMPUTE)
    torch.testing.assert_close(actual, expected)
    assert modes == expected_modes
