"""Autocast: offload operands follow its lists as the plain device's do."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import CACHED, COMPUTE, GPU, OFFLOAD, grads, same
from torch import nn

import torch_offload

KIND = COMPUTE.type
LOWER = [torch.bfloat16, torch.float16]

SUMMED_IN_FP32 = (
    "the weights of a GRU are fetched once for all of its steps; autocast keeps casts of parameters only, so that each step "
    "casts anew, and gradients are summed in fp32"
)


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.Linear(6, 4), (5, 6)),
        lambda: (nn.Conv2d(2, 3, 3), (1, 2, 5, 5)),
        lambda: (nn.ConvTranspose1d(2, 3, 3), (1, 2, 5)),
        lambda: (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)), (5, 6)),
        lambda: (
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)),
            (2, 2, 5, 5),
        ),
        lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
        pytest.param(
            lambda: (nn.GRU(4, 3), (5, 2, 4)),
            # On a GPU it is one operation, which casts its weights once.
            marks=pytest.mark.xfail(not GPU, reason=SUMMED_IN_FP32, strict=True),
        ),
        lambda: (nn.LSTMCell(4, 3), (2, 4)),
    ],
    ids=["Linear", "Conv2d", "ConvTranspose1d", "norms", "BatchNorm", "Transformer", "GRU", "LSTMCell"],
)
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_modules(make, dtype, feed):
    def run(device):
        net, shape = make()
        net.to(device)
        x = torch.randn(shape).to(device if feed == "offload" else COMPUTE).requires_grad_()
        with torch.autocast(KIND, dtype):
            y = net(x)
            y = y[0] if isinstance(y, tuple) else y
            loss = y.float().square().mean()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())
        return y, loss, x.grad, grads(net)

    same(run)


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w,  # lower precision
        lambda x, w: F.linear(x, w),
        lambda x, w: torch.addmm(x, x, w),
        lambda x, w: torch.einsum("ij,kj->ik", x, w),
        lambda x, w: torch.baddbmm(w[None], x[None], w[None]),
        lambda x, w: F.mse_loss(x.to(torch.bfloat16), w),  # fp32
        lambda x, w: torch.cdist(x, w),
        lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
        lambda x, w: torch.cat([x.clone(), w]),  # promote
        lambda x, w: torch.stack([x, w.half().float()]),
        lambda x, w: torch.addcmul(x, w, w),
        lambda x, w: x + w,  # as it is
        lambda x, w: x * w[0],
        lambda x, w: torch.where(x > 0, x, w),
        lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
        lambda x, w: torch.linalg.multi_dot([x, x, w]) if GPU else x @ x @ w,
        lambda x, w: F.cosine_similarity(x, w),
        lambda x, w: F.embedding(torch.tensor([1, 2], device=x.device), w) @ x.t(),
        lambda x, w: F.prelu(x, w[0]),
        lambda x, w: torch.index_put(x.clone(), (torch.tensor([0], device=x.device),), w[:1]),
    ],
)
def test_lists(function, dtype):
    def run(device):
        x = torch.randn(8, 8).to(COMPUTE).requires_grad_()
        w = torch.randn(8, 8).to(device).requires_grad_()
        with torch.autocast(KIND, dtype):
            y = function(x, w)
        assert y.device == COMPUTE
        (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape).to(COMPUTE)).sum().backward()
        return y, x.grad, w.grad

    same(run)


@pytest.mark.parametrize("dtype", LOWER, ids=str)
def test_results_are_of_the_lower_precision(dtype):
    layer = nn.Linear(6, 4).to(OFFLOAD)
    with torch.autocast(KIND, dtype):
        assert layer(torch.randn(5, 6).to(COMPUTE)).dtype == dtype
        with torch.autocast(KIND, enabled=False):
            assert layer(torch.randn(5, 6).to(COMPUTE)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize(
    "uses",
    [
        [["layer", "layer"]],
        [["layer"], ["layer"]],
        [["layer", "cell", "layer"], ["cell", "layer"]],
        [["frozen", "layer", "frozen", "layer"]],
        [["layer", "plain", "layer"]],
    ],
    ids=["one region", "two regions", "several", "frozen", "no autocast between"],
)
def test_gradients_of_a_weight_that_is_used_several_times(uses, feed, cache, dtype):
    """One region has one cast of each parameter, and sums its gradients in the lower precision."""

    def run(device):
        nets = {name: nn.Linear(8, 8) for name in ("layer", "cell", "frozen")}
        nets["frozen"].requires_grad_(False)
        for net in nets.values():
            net.to(device)
        x = torch.randn(3, 8).to(device if feed == "offload" else COMPUTE)
        loss = 0
        for region in uses:
            with torch.autocast(KIND, dtype, cache_enabled=cache):
                y = x
                for name in region:
                    if name == "plain":
                        with torch.autocast(KIND, enabled=False):
                            y = nets["layer"](y.float())
                    else:
                        y = nets[name](y)
            loss = loss + y.float().square().sum()
        loss.backward()
        return loss, [grads(net) for net in nets.values()]

    same(run)


def test_a_region_within_another_is_one_region():
    def run(device):
        w = torch.randn(8, 8).to(device).requires_grad_()
        x = torch.randn(3, 8).to(COMPUTE)
        with torch.autocast(KIND, torch.bfloat16):
            y = F.linear(x, w)
            with torch.autocast(KIND, torch.bfloat16):
                y = F.linear(y, w)
            y = F.linear(y, w)
        y.float().square().sum().backward()
        return y, w.grad

    same(run)


def test_several_backward_passes_within_a_region():
    def run(device):
        w = torch.randn(8, 8).to(device).requires_grad_()
        x = torch.randn(3, 8).to(COMPUTE)
        with torch.autocast(KIND, torch.bfloat16):
            first = F.linear(x, w).float().sum()
            second = F.linear(x + 1, w).float().square().sum()
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        return w.grad

    same(run)


def test_no_region_is_kept():
    """What a region knows of its parameters ends with their graph, and keeps no parameter alive."""
    w = torch.randn(8, 8).to(OFFLOAD).requires_grad_()
    gone = weakref.ref(w)
    with torch.autocast(KIND, torch.bfloat16):
        y = F.linear(torch.randn(3, 8).to(COMPUTE), w)
    y.float().sum().backward()
    del y, w
    gc.collect()
    assert gone() is None


def saved_weights(result):
    """What is said by those that the layers' nodes have saved, when they are read."""
    nodes, sentences = [result.grad_fn], []
    while nodes:
        node = nodes.pop()
        nodes += [below for below, _ in node.next_functions if below is not None]
        if hasattr(node, "_saved_mat2"):
            try:
                node._saved_mat2.untyped_storage().data_ptr()
            except RuntimeError as error:
                sentences.append(str(error))
    return sentences


@pytest.mark.skipif(not CACHED, reason="what is fetched is the host's memory itself")
@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("feed", [COMPUTE, OFFLOAD], ids=str)
def test_a_cast_weight_does_not_stay_for_backward(feed, dtype):
    layer = nn.Linear(512, 512, bias=False).to(OFFLOAD)
    x = torch.randn(3, 512).to(feed).requires_grad_()
    with torch.autocast(KIND, dtype):
        layer(x)  # the first product of a process allocates a workspace for good
    torch_offload.empty_cache()
    before = torch.cuda.memory_allocated() if GPU else 0
    with torch.autocast(KIND, dtype):
        y = layer(x)
        z = layer(y)
    torch_offload.empty_cache()
    if GPU:
        assert torch.cuda.memory_allocated() - before < 512 * 512
    else:
        said = saved_weights(z)
        assert len(said) == 2
        assert all("has memory only while its backward runs" in sentence for sentence in said)
    before = torch_offload.memory_stats()["cache.fetches"], torch_offload.stats()["bytes_to_device"]
    z.float().sum().backward()
    if feed == COMPUTE:
        assert torch_offload.memory_stats()["cache.fetches"] - before[0] == 2, "each of them once"
    activations = torch_offload.stats()["bytes_to_device"] - before[1] - layer.weight.nbytes
    assert 0 <= activations <= 64 * 1024, "the weight travels once"


@pytest.mark.skipif(not CACHED, reason="a cast is kept as on the plain device")
def test_a_cast_weight_that_has_changed_is_refused():
    layer = nn.Linear(8, 8).to(OFFLOAD)
    with torch.autocast(KIND, torch.bfloat16):
        y = layer(torch.randn(3, 8).to(COMPUTE).requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.float().sum().backward()


def test_without_autocast_dtypes_must_agree():
    layer = nn.Linear(6, 4).to(OFFLOAD)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(5, 6, dtype=torch.bfloat16).to(COMPUTE))


def test_low_precision_input_beside_fp32_weights():
    def run(device):
        layer = nn.Linear(6, 4).to(device)
        x = torch.randn(5, 6).to(COMPUTE, torch.bfloat16).requires_grad_()
        with torch.autocast(KIND, torch.bfloat16):
            y = layer(x)
        y.float().sum().backward()
        return y, x.grad, grads(layer)

    same(run)


def test_weight_used_twice_in_one_region():
    """Autocast caches casts of leaves; a cast of a fetched tensor must not stay in that cache past a write."""

    def run(device):
        layer = nn.Linear(8, 8).to(device)
        x = torch.randn(3, 8).to(COMPUTE)
        results = []
        with torch.autocast(KIND, torch.bfloat16):
            results.append(layer(layer(x)))
            with torch.no_grad():
                results.append(layer(x))
        with torch.no_grad():
            layer.weight.mul_(2)
        with torch.autocast(KIND, torch.bfloat16):
            results.append(layer(x))
        results[-1].float().sum().backward()
        return results, grads(layer)

    same(run)


def test_training_with_autocast():
    def run(device):
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=2**-4)
        losses = []
        for _ in range(4):
            x = torch.randn(6, 8).to(COMPUTE)
            optimizer.zero_grad()
            with torch.autocast(KIND, torch.bfloat16):
                loss = F.cross_entropy(net(x), torch.randint(0, 4, (6,)).to(COMPUTE))
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, list(net.parameters())

    same(run)


@pytest.mark.parametrize("overflows", [False, True])
def test_float16_with_a_scaler(overflows):
    """A step whose gradients overflow is left out, and the scale halved, as on the plain device."""

    def run(device):
        net = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler(COMPUTE.type, init_scale=2.0**24 if overflows else 256.0, growth_interval=2)
        x, found = torch.randn(6, 9).to(COMPUTE), []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast(COMPUTE.type, torch.float16):
                loss = net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append((loss.detach().cpu(), scaler.get_scale()))
        return found, list(net.parameters())

    found, _ = same(run)
    scales = [scale for _, scale in found]
    assert scales[0] == 2.0**23 if overflows else scales == [256.0, 512.0, 512.0, 1024.0]


@pytest.mark.parametrize("inference", [False, True])
def test_without_gradients(inference):
    def run(device):
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Conv1d(3, 2, 3)).to(device)
        x = torch.randn(3, 8).to(COMPUTE)
        with torch.inference_mode(inference), torch.no_grad(), torch.autocast(KIND, torch.bfloat16):
            return net(x)

    same(run)


class Exponential(torch.autograd.Function):
    """Computes in fp32 whatever it is given."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=KIND, cast_inputs=torch.float32)
    def forward(ctx, x, scales):
        ctx.save_for_backward(x, *scales)
        return (x * scales[0]).exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type=KIND)
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale * (x * scale).exp(), None


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_a_function_that_casts_its_inputs(feed, dtype):
    def run(device):
        w = torch.randn(4, 4).to(device).requires_grad_()
        x = torch.randn(3, 4).to(device if feed == "offload" else COMPUTE)
        with torch.autocast(KIND, dtype):
            lower = x @ w
            y = Exponential.apply(lower, [lower.detach()])
        assert (lower.dtype, y.dtype) == (dtype, torch.float32)
        y.sum().backward()
        return y, w.grad

    same(run)


def test_a_function_that_casts_its_inputs_on_offload():
    """By the name of their device, which is cast on its pair."""
    forward = torch.amp.custom_fwd(lambda ctx, x, w: x @ w, device_type="offload", cast_inputs=torch.float32)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return forward(ctx, x, w)

    def run(device):
        w = torch.randn(4, 4).to(device)
        x = torch.randn(3, 4).to(COMPUTE, torch.bfloat16)
        with torch.autocast("offload", torch.bfloat16):
            return Product.apply(x, w)

    assert run(OFFLOAD).dtype == torch.float32
    same(run)


# autocast("offload") drives the paired device's.


@pytest.mark.parametrize("dtype", LOWER, ids=str)
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_autocast_of_offload_is_that_of_its_pair(feed, dtype):
    def run(device):
        net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(device)
        x = torch.randn(5, 6).to(device if feed == "offload" else COMPUTE)
        with torch.autocast(device.type, dtype):
            y = net(x)
            with torch.autocast(device.type, enabled=False):
                z = net(x)
        assert (y.dtype, z.dtype) == (dtype, torch.float32)
        y.float().sum().backward()
        return y, z, grads(net)

    same(run)


def test_autocast_of_offload_leaves_no_trace():
    before = torch.is_autocast_enabled(KIND), torch.get_autocast_dtype(KIND)
    with torch.autocast("offload", torch.bfloat16):
        assert torch.is_autocast_enabled("offload")
    assert not torch.is_autocast_enabled("offload")
    assert (torch.is_autocast_enabled(KIND), torch.get_autocast_dtype(KIND)) == before


def test_the_switch_of_the_paired_device():
    """What the context sets, by itself. That of offload casts nothing: it has no say in what the pair computes alone."""
    layer, x = nn.Linear(6, 4).to(OFFLOAD), torch.randn(5, 6).to(COMPUTE)
    for kind, dtype in ((KIND, torch.bfloat16), ("offload", torch.float32)):
        before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, torch.bfloat16)
        try:
            assert layer(x).dtype == dtype
        finally:
            torch.set_autocast_enabled(kind, before[0])
            torch.set_autocast_dtype(kind, before[1])
            torch.clear_autocast_cache()


def test_autocast_as_a_decorator():
    layer = nn.Linear(6, 4).to(OFFLOAD)

    @torch.autocast("offload", torch.bfloat16)
    def forward(x):
        return layer(x)

    assert forward(torch.randn(5, 6).to(COMPUTE)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: F.cross_entropy(x, y),
        lambda x, y: F.cross_entropy(x, x.softmax(-1)),
        lambda x, y: torch.quantile(x.float() if GPU else x, 0.3),
        lambda x, y: torch.fft.rfft(x.float() if GPU else x),
        lambda x, y: F.adaptive_avg_pool3d(x.view(1, 2, 2, 4, 4), 2) if not GPU else x,
    ],
    ids=["cross_entropy", "of probabilities", "quantile", "rfft", "pool"],
)
def test_lists_of_whole_operations(function):
    """What is made of others has a place of its own in the CPU's lists."""

    def run(device):
        x = torch.randn(8, 8).bfloat16().to(device).requires_grad_()
        y = torch.randint(0, 8, (8,)).to(device)
        with torch.autocast(KIND, torch.bfloat16):
            result = function(x, y)
        torch.view_as_real(result).sum().backward() if result.is_complex() else result.float().sum().backward()
        return result, x.grad

    same(run)
