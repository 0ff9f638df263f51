"""Modules of torch.nn: a training step with weights on offload is the plain device's, in every bit.

Each module is fed with inputs on the compute device (weights follow them) and with inputs on offload (everything does).
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same, at, grads, same, values
from torch import nn
from torch.nn.utils import parametrizations

import torch_offload


def normal(*shape):
    return lambda: torch.randn(*shape)


def tokens(*shape, below=11):
    return lambda: torch.randint(0, below, shape)


MODULES = {
    "LayerNorm": (lambda: nn.LayerNorm(6), [normal(4, 6)]),
    "LayerNorm without affine": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False)),
        [normal(4, 6)],
    ),
    "RMSNorm": (lambda: nn.RMSNorm(6), [normal(4, 6)]),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), [normal(4, 6, 5)]),
    "InstanceNorm": (lambda: nn.InstanceNorm2d(3, affine=True), [normal(2, 3, 4, 4)]),
    "InstanceNorm with statistics": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), [normal(2, 3, 8)]),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), [normal(5, 6)]),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), [normal(2, 3, 4, 4)]),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), [normal(2, 3, 2, 3, 3)]),
    "BatchNorm without affine": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False)), [normal(5, 6)]),
    "BatchNorm without statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), [normal(5, 6)]),
    "BatchNorm cumulative": (lambda: nn.BatchNorm1d(6, momentum=None), [normal(5, 6)]),
    "BatchNorm eval": (lambda: nn.BatchNorm1d(6).eval(), [normal(5, 6)]),
    "Conv BatchNorm": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()), [normal(2, 2, 6, 6)]),
    "Embedding": (lambda: nn.Embedding(11, 4), [tokens(3, 5)]),
    "Embedding with padding": (lambda: nn.Embedding(11, 4, padding_idx=2), [tokens(3, 5)]),
    "Embedding max_norm": (lambda: nn.Embedding(11, 4, max_norm=1.0), [tokens(3, 5)]),
    "Embedding scale_grad": (lambda: nn.Embedding(11, 4, scale_grad_by_freq=True), [tokens(3, 5)]),
    "EmbeddingBag sum": (lambda: nn.EmbeddingBag(11, 4, mode="sum"), [tokens(3, 5)]),
    "EmbeddingBag mean": (lambda: nn.EmbeddingBag(11, 4, mode="mean"), [tokens(3, 5)]),
    "EmbeddingBag max": (lambda: nn.EmbeddingBag(11, 4, mode="max"), [tokens(3, 5)]),
    "RNN": (lambda: nn.RNN(4, 3, num_layers=2), [normal(5, 2, 4)]),
    "RNN relu": (lambda: nn.RNN(4, 3, nonlinearity="relu", bias=False), [normal(5, 2, 4)]),
    "LSTM": (lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), [normal(2, 5, 4)]),
    "LSTM projected": (lambda: nn.LSTM(4, 3, proj_size=2), [normal(5, 2, 4)]),
    "LSTM dropout": (lambda: nn.LSTM(4, 3, num_layers=2, dropout=0.5), [normal(5, 2, 4)]),
    "GRU": (lambda: nn.GRU(4, 3, bidirectional=True), [normal(5, 2, 4)]),
    "RNNCell": (lambda: nn.RNNCell(4, 3), [normal(2, 4)]),
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), [normal(2, 4)]),
    "GRUCell": (lambda: nn.GRUCell(4, 3), [normal(2, 4)]),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), [normal(5, 2, 8)]),
    "TransformerEncoderLayer first": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True, batch_first=True, activation="gelu"),
        [normal(2, 5, 8)],
    ),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(8, 2, 16), [normal(5, 2, 8), normal(4, 2, 8)]),
    "Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16), [normal(5, 2, 8), normal(4, 2, 8)]),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), [normal(5, 6)]),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 4)), [normal(5, 6)]),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), [normal(5, 4)]),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Conv1d(4, 4, 3)), [normal(2, 4, 6)]),
    "Dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), [normal(5, 6)]),
    "Dropout of a third": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(1 / 3)), [normal(5, 6)]),
    "Dropout2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.Dropout2d(0.5)), [normal(2, 2, 3, 3)]),
    "AlphaDropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.AlphaDropout(0.5)), [normal(5, 6)]),
    "RReLU": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RReLU()), [normal(5, 6)]),
    "PReLU": (lambda: nn.PReLU(6), [normal(5, 6)]),
    "Bilinear": (lambda: nn.Bilinear(3, 4, 2), [normal(5, 3), normal(5, 4)]),
    "activations": (
        lambda: nn.Sequential(
            nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 6), nn.ELU(),
            nn.Linear(6, 6), nn.Hardswish(), nn.Linear(6, 6), nn.LeakyReLU(inplace=True), nn.Linear(6, 6), nn.GLU(),
        ),
        [normal(5, 6)],
    ),
    "pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(2, 1),
            nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ),
        [normal(2, 2, 8, 8)],
    ),
    "PixelShuffle": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 1), nn.PixelShuffle(2), nn.Upsample(scale_factor=2)),
        [normal(1, 2, 3, 3)],
    ),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 11, [3, 7]), [normal(5, 8), tokens(5)],
    ),
}  # fmt: skip


def tensors_of(output):
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def training(make, inputs, feed):
    """Forward, backward and one exact step of SGD, twice."""

    def run(device):
        net = make().to(device)
        place = device if feed == "offload" else COMPUTE
        results = []
        for _ in range(2):
            xs = [make_input().to(place) for make_input in inputs]
            xs = [x.requires_grad_() if x.is_floating_point() else x for x in xs]
            # Dropout draws on the device where it computes; give it the same state after the inputs' draws.
            torch.manual_seed(5)
            outputs = [t for t in tensors_of(net(*xs)) if t.is_floating_point()]
            assert all(t.device.type == place.type for t in outputs)
            net.zero_grad()
            sum(t.square().sum() for t in outputs).backward()
            results.append((outputs, [x.grad for x in xs], copy.deepcopy(grads(net)), copy.deepcopy(values(net))))
            torch.optim.SGD(net.parameters(), lr=2**-6).step()
        return results, values(net)

    return run


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("name", MODULES)
def test_training(name, feed):
    if GPU and name == "AdaptiveLogSoftmaxWithLoss":
        pytest.skip("PyTorch's deterministic index_copy_ refuses a single row on CUDA, without offload too")
    make, inputs = MODULES[name]
    same(training(make, inputs, feed))


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", [None, "padding", "causal"])
def test_multihead_attention(mask, weights, feed):
    def run(device):
        attention = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
        place = device if feed == "offload" else COMPUTE
        x = torch.randn(3, 5, 8).to(place).requires_grad_()
        masks = {}
        if mask == "padding":
            masks["key_padding_mask"] = torch.tensor([[False] * 4 + [True]] * 3).to(place)
        elif mask == "causal":
            masks["attn_mask"] = nn.Transformer.generate_square_subsequent_mask(5).to(place)
            masks["is_causal"] = True
        y, w = attention(x, x, x, need_weights=weights, **masks)
        y.square().sum().backward()
        return y, w, x.grad, grads(attention)

    same(run)


@pytest.mark.parametrize("eval_mode", [False, True])
def test_transformer_encoder_without_gradients(eval_mode):
    def run(device):
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2).to(device)
        net.train(not eval_mode)
        with torch.no_grad():
            return net(torch.randn(3, 5, 8).to(COMPUTE)), net(torch.randn(3, 5, 8).to(device))

    same(run)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_transformer_encoder_of_padded_input(mode):
    """PyTorch makes a nested tensor of the input, so that nothing is computed for padding; of offload input it makes none."""
    padding = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()

    def run(device, fed_from=COMPUTE):
        torch.manual_seed(0)
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval().to(device)
        with mode():
            return net(torch.randn(2, 5, 8).to(fed_from), src_key_padding_mask=padding.to(fed_from)).cpu()

    expected = run(COMPUTE)
    assert_same(run(OFFLOAD), expected)
    torch.testing.assert_close(run(OFFLOAD, OFFLOAD)[~padding], expected[~padding])


def test_batch_norm_statistics():
    """Its schema doesn't say that the running statistics are written to."""

    def run(device):
        net = nn.BatchNorm1d(6, momentum=0.25).to(device)
        seen = []
        version = net.running_mean._version
        for k in range(4):
            net(torch.randn(5, 6).to(COMPUTE) + k)
            seen.append((net.running_mean.clone(), net.running_var.clone(), net.num_batches_tracked.clone()))
        versions = net.running_mean._version > version
        net.eval()
        before = net.running_mean.clone()
        y = net(torch.randn(5, 6).to(COMPUTE))
        assert torch.equal(before.cpu(), net.running_mean.cpu())
        return seen, y, versions

    same(run)


@pytest.mark.parametrize(
    "name",
    [
        "batch_norm_update_stats",
        pytest.param("batch_norm_gather_stats", marks=pytest.mark.gpu),
        pytest.param("batch_norm_gather_stats_with_counts", marks=pytest.mark.gpu),
    ],
)
def test_statistics_of_batch_norm_over_several_processes(name):
    """What nn.SyncBatchNorm calls; their schemas don't say either that the running statistics are written to."""

    def run(device):
        running = torch.zeros(3).to(device), torch.ones(3).to(device)
        x, parts = torch.randn(2, 3, 4).to(COMPUTE), torch.rand(2, 3).to(COMPUTE) + 0.5
        if name == "batch_norm_update_stats":
            results = torch.batch_norm_update_stats(x, *running, 0.25)
        elif name == "batch_norm_gather_stats":
            results = torch.batch_norm_gather_stats(x, parts, parts + 1, *running, 0.25, 1e-5, 8)
        else:
            counts = torch.tensor([8.0, 8.0]).to(COMPUTE)
            results = torch.batch_norm_gather_stats_with_counts(x, parts, parts + 1, *running, 0.25, 1e-5, counts)
        torch_offload.empty_cache()
        return results, running, [torch.zeros(3).to(COMPUTE) + r for r in running]

    same(run)


@pytest.mark.parametrize("grad", [True, False])
def test_batch_norm_on_offload_inputs_keeps_its_statistics(grad):
    def run(device):
        net = nn.BatchNorm2d(3).to(device)
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                y = net(torch.randn(2, 3, 4, 4).to(device))
        return y, net.running_mean, net.running_var, net.num_batches_tracked

    same(run)


@pytest.mark.parametrize("training_mode", [True, False])
def test_functional_norms(training_mode):
    def run(device):
        mean, var = torch.zeros(3).to(device), torch.ones(3).to(device)
        x = torch.randn(4, 3, 5).to(COMPUTE)
        a = F.batch_norm(x, mean, var, training=training_mode)
        b = F.instance_norm(x, mean, var, use_input_stats=training_mode)
        return a, b, mean, var

    same(run)


LAZY = {
    "linear": (lambda: nn.LazyLinear(3), (5, 6)),
    "conv1d": (lambda: nn.Sequential(nn.LazyConv1d(3, 2), nn.LazyInstanceNorm1d(affine=True)), (2, 3, 4)),
    "conv2d": (lambda: nn.Sequential(nn.LazyConv2d(3, 2), nn.LazyBatchNorm2d()), (2, 3, 4, 4)),
    "conv3d": (lambda: nn.Sequential(nn.LazyConv3d(3, 2), nn.LazyBatchNorm3d()), (2, 3, 4, 4, 4)),
    "transposed": (lambda: nn.Sequential(nn.LazyConvTranspose2d(3, 2), nn.LazyInstanceNorm2d()), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_modules(name):
    """Parameters that the first input makes: with the values that a CPU model gets."""
    lazy, shape = LAZY[name]
    net, cpu = lazy().to(OFFLOAD), lazy()
    x = torch.randn(shape)
    for module, place in ((net, COMPUTE), (cpu, CPU)):
        torch.manual_seed(1)
        module(x.to(place))
    assert next(net.parameters()).is_offload
    assert_same(dict(net.named_parameters()), dict(cpu.named_parameters()))
    plain = copy.deepcopy(net).to(COMPUTE)
    results = []
    for module in (net, plain):
        y = module(x.to(COMPUTE))
        y.square().sum().backward()
        results.append((y, grads(module), values(module)))
    assert_same(*results)


def test_functional_call():
    def run(device):
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(device)
        other = {name: (value * 2).detach().requires_grad_() for name, value in net.named_parameters()}
        y = torch.func.functional_call(net, other, (torch.randn(5, 4).to(COMPUTE),))
        y.square().sum().backward()
        assert all(p.grad is None for p in net.parameters())
        return y, {name: value.grad for name, value in other.items()}

    same(run)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y, t),
        lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1, reduction="sum"),
        lambda y, t: F.nll_loss(y.log_softmax(-1), t),
        lambda y, t: F.multi_margin_loss(y, t),
        lambda y, t: F.binary_cross_entropy_with_logits(y, F.one_hot(t, 6).to(y)),
        lambda y, t: F.mse_loss(y, F.one_hot(t, 6).to(y)),
        lambda y, t: F.huber_loss(y, F.one_hot(t, 6).to(y)),
        lambda y, t: F.kl_div(y.log_softmax(-1), F.one_hot(t, 6).to(y)),
    ],
    ids=["cross_entropy", "smoothed", "nll", "margin", "bce", "mse", "huber", "kl"],
)
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_losses(loss, feed):
    def run(device):
        net = nn.Linear(4, 6).to(device)
        place = device if feed == "offload" else COMPUTE
        y = loss(net(torch.randn(5, 4).to(place)), torch.tensor([0, 5, 2, 1, 3], device=place))
        y.backward()
        return y, grads(net)

    same(run)


def test_class_weights_on_offload():
    def run(device):
        weight = torch.rand(6).to(device)
        x = torch.randn(5, 6).to(COMPUTE).requires_grad_()
        y = F.cross_entropy(x, torch.tensor([0, 5, 2, 1, 3], device=COMPUTE), weight=weight)
        y.backward()
        return y, x.grad

    same(run)


class Block(nn.Module):
    def __init__(self, width=16, heads=2, norm=nn.LayerNorm):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = norm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Language(nn.Module):
    """Embedding, positions as a bare parameter, blocks, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.positions = nn.Parameter(torch.randn(8, 16) * 0.02)
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    "feed",
    [
        "plain",
        pytest.param(
            "offload",
            marks=pytest.mark.xfail(
                not GPU,
                reason="on the CPU rms_norm is made of operations that use x twice; x is fetched once for all of them, so "
                "three gradients are summed in another order",
                strict=False,
            ),
        ),
    ],
)
def test_rms_norm_in_a_residual_connection(feed):
    def run(device):
        block = Block(norm=nn.RMSNorm).to(device)
        x = torch.randn(2, 6, 16).to(device if feed == "offload" else COMPUTE).requires_grad_()
        y = block(x)
        y.square().sum().backward()
        return y, x.grad, grads(block)

    same(run)


@pytest.mark.memcheck
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_language_model_with_a_tied_head(feed, dtype):
    def run(device):
        net = Language().to(dtype).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=2**-6)
        place = device if feed == "offload" else COMPUTE
        losses = []
        for _ in range(3):
            tokens = torch.randint(0, 13, (2, 7)).to(place)
            loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        assert net.head.weight is net.embedding.weight
        return losses, grads(net), values(net)

    same(run)


def test_layers_in_an_order_that_changes():
    def run(device):
        experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)]).to(device)
        order = torch.Generator().manual_seed(3)
        results = []
        for _ in range(6):
            x = torch.randn(4, 8).to(COMPUTE).requires_grad_()
            h = x
            for k in torch.randint(0, 5, (4,), generator=order).tolist():
                h = experts[k](h).tanh()
            h.square().sum().backward()
            results.append((h, x.grad))
        return results, grads(experts)

    same(run)


@pytest.mark.skipif(not GPU, reason="needs a plain device that is not the CPU")
@pytest.mark.gpu
def test_cpu_inputs_beside_offload_weights_run_on_the_cpu():
    net = Language().to(OFFLOAD)
    y = net(torch.randint(0, 13, (2, 7)))
    assert y.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "padding"),
    [((3, 5), (2, 1)), ((2, 3, 4, 5), (1, 2, 0, 3)), ((3, 4, 5), (0, 0, 1, 1)), ((2, 3, 4, 2, 3), (1, 1, 2, 0, 0, 1))],
)
def test_a_replicated_border(shape, padding, dtype):
    """Where deterministic algorithms are wanted, PyTorch pads CUDA tensors in another way than those of other devices."""

    def run(device):
        x = at(device, *shape, dtype=dtype)
        if x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        y = F.pad(x, padding, mode="replicate")
        y.backward(at(device, *y.shape, seed=1, dtype=dtype))
        return y, x.grad, y.stride()

    assert same(run)[0].is_offload
