"""Lookups in large tables: rows are read where they are, in host memory, and no value, gradient or order changes."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from helpers import CACHED, COMPUTE, CPU, GPU, OFFLOAD, Tied, assert_same, at, data, deterministic, grads, says
from tables import ROWS, TABLE, WIDTH, index, nothing_fits, read, table  # noqa: F401
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_offload

# By name: the call, and how many rows it reads.
LOOKUPS = {
    "embedding": (lambda w: F.embedding(index(3, 5), w), 15),
    "embedding padded": (lambda w: F.embedding(index(9), w, padding_idx=int(index(9)[2])), 9),
    "embedding scaled": (lambda w: F.embedding(index(4, 4), w, scale_grad_by_freq=True), 16),
    "bag sum": (lambda w: F.embedding_bag(index(4, 6), w, mode="sum"), 24),
    "bag mean": (lambda w: F.embedding_bag(index(12), w, torch.tensor([0, 5], device=COMPUTE), mode="mean"), 12),
    "bag max": (lambda w: F.embedding_bag(index(4, 6), w, mode="max"), 24),
    "bag padded": (lambda w: F.embedding_bag(index(4, 6), w, mode="sum", padding_idx=3), 24),
    "bag weighted": (
        lambda w: F.embedding_bag(index(4, 6), w, mode="sum", per_sample_weights=data(4, 6)),
        24,
    ),
    "index_select": (lambda w: w.index_select(0, index(7)), 7),
    "index_select int32": (lambda w: torch.index_select(w, -2, index(7).int()), 7),
    "index": (lambda w: w[index(2, 3)], 6),
    "index of numbers": (lambda w: w[index(6), index(6, rows=WIDTH)], 6 * 128 / (WIDTH * 4)),  # 128 bytes at least
    "index of three dimensions": (lambda w: w.view(32, -1, WIDTH)[:, index(2, rows=ROWS // 32)], 64),
    "of a view": (lambda w: F.embedding(index(5, rows=ROWS // 2), w[ROWS // 2 :]), 5),
    "of a wider view": (lambda w: F.embedding(index(4, rows=ROWS // 2), w.view(ROWS // 2, 2 * WIDTH)), 8),
}


@pytest.mark.memcheck
@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("mode", ["train", "no_grad", "inference"])
def test_rows_are_read_where_they_are(name, mode):
    call, rows = LOOKUPS[name]
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "train"), deterministic():
        results = []

        def run(device):
            weight = table(device).requires_grad_(mode == "train")
            result = call(weight)
            results.append(result)
            if mode != "train":
                return
            (result * data(*result.shape, seed=3)).sum().backward()
            assert weight.grad.device == weight.device
            results.append(weight.grad)

        run(COMPUTE)
        counts = read(lambda: run(OFFLOAD))
        half = len(results) // 2
        assert_same(results[half:], results[:half])
        assert results[half].device == COMPUTE
        if CACHED:
            assert counts == (1, rows * WIDTH * 4, 0), "the table was copied"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_dtypes(dtype):
    weight, results = (table(CPU, rows=2 * ROWS) * 10).to(dtype), []
    moved = weight.to(OFFLOAD)
    counts = read(lambda: results.append(F.embedding(index(5), moved)))
    assert_same(results[0], F.embedding(index(5), weight.to(COMPUTE)))
    if CACHED:
        assert counts == (1, 5 * max(WIDTH * dtype.itemsize, 128), 0)


FETCHED = {
    "most rows": lambda w: F.embedding(index(ROWS - 5), w),
    "numbers that lie apart": lambda w: w[:, index(2, rows=WIDTH)],
    "a mask": lambda w: w[index(ROWS) < 5],
    "rows that lie apart": lambda w: F.embedding(index(5, rows=WIDTH), w.t()),
    "a small table": lambda w: F.embedding(index(5, rows=64), w[:64]),
    "what is no lookup": lambda w: w.gather(0, index(5, WIDTH)),
}


@pytest.mark.skipif(not CACHED, reason="there is no cache")
@pytest.mark.parametrize("name", FETCHED)
def test_all_else_is_fetched(name):
    weight, call, results = table(OFFLOAD), FETCHED[name], []
    count, _, moved = read(lambda: results.append(call(weight)))
    assert count == 0
    assert moved > 0
    assert_same(results[0], call(table(COMPUTE)))


@pytest.mark.skipif(not CACHED, reason="there is no cache")
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="nothing stays")
def test_a_table_that_fits_is_fetched_and_stays():
    torch_offload.set_budget(64 * TABLE)
    weight = nn.Parameter(table(OFFLOAD))
    torch_offload.synchronize()
    assert read(lambda: F.embedding(index(5), weight))[0] == 0
    assert read(lambda: F.embedding(index(5), weight)) == (0, 0, 0)


@pytest.mark.skipif(not CACHED, reason="there is no cache")
@pytest.mark.skipif("TORCH_OFFLOAD_EVICT" in os.environ, reason="nothing stays")
def test_a_table_that_the_cache_has_is_not_read_over_the_link():
    """A tied head has fetched all of it."""
    net = Tied(ROWS, WIDTH)
    net.other = nn.Linear(WIDTH, 4 * ROWS)  # so that not all parameters fit
    net = net.to(OFFLOAD)
    torch_offload.set_budget(2 * TABLE)
    with torch.no_grad():
        net.head(data(2, WIDTH))
        assert read(lambda: net.embedding(index(5))) == (0, 0, 0)
        torch_offload.empty_cache()
        assert read(lambda: net.embedding(index(5))) == (1, 5 * WIDTH * 4, 0)


@pytest.mark.parametrize("place", ["plain", "offload"])
def test_training_sees_every_update(place):
    """Steps on the host write to rows that kernels have read, and are read next."""
    net = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3))
    expected = copy.deepcopy(net)
    net = net.to(OFFLOAD)
    where = COMPUTE if place == "plain" else OFFLOAD
    with deterministic():
        plain = copy.deepcopy(expected).to(COMPUTE)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (net, expected)]
        for step in range(5):
            tokens = index(4, 7, seed=step % 2)
            plain.load_state_dict(expected.state_dict())
            losses = [m(t).square().mean() for m, t in ((net, tokens.to(where)), (plain, tokens))]
            assert_same(losses[0], losses[1])
            for m, loss in ((net, losses[0]), (plain, losses[1])):
                m.zero_grad()
                loss.backward()
            assert_same(grads(net), grads(plain))
            for to, of in zip(expected.parameters(), plain.parameters(), strict=True):
                to.grad = of.grad.to(CPU)
            for optimizer in optimizers:
                optimizer.step()
            assert_same(net.state_dict(), expected.state_dict())


def test_a_write_waits_for_the_rows_that_are_being_read():
    weight = table(OFFLOAD)
    if GPU:
        torch.cuda._sleep(50_000_000)
    before = F.embedding(index(5), weight)
    weight.zero_()
    assert_same(before, F.embedding(index(5), table(COMPUTE)))
    assert_same(F.embedding(index(5), weight), torch.zeros(5, WIDTH))


def test_memory_that_is_let_go_waits_for_the_rows_that_are_being_read():
    if GPU:
        torch.cuda._sleep(50_000_000)
    before = F.embedding(index(5), table(OFFLOAD))
    others = [torch.zeros(ROWS, WIDTH, device=OFFLOAD) for _ in range(4)]
    assert_same(before, F.embedding(index(5), table(COMPUTE)))
    assert all(other.device.type == "offload" for other in others)


def test_weights_of_a_bag_have_their_gradient():
    """It is made of the table, which is fetched for that."""

    def run(device):
        weight = table(device).requires_grad_()
        weights = data(4, 6).requires_grad_()
        F.embedding_bag(index(4, 6), weight, mode="sum", per_sample_weights=weights).square().sum().backward()
        return weight.grad, weights.grad

    with deterministic():
        assert_same(run(OFFLOAD), run(COMPUTE))


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_weights_of_a_bag_that_record_nothing(mode):
    weights = data(4, 6).requires_grad_()
    weight, results = table(OFFLOAD), []

    def run():
        with torch.inference_mode(mode == "inference"), torch.no_grad():
            results.append(F.embedding_bag(index(4, 6), weight, mode="sum", per_sample_weights=weights))

    counts = read(run)
    assert_same(results[0], F.embedding_bag(index(4, 6), table(COMPUTE), mode="sum", per_sample_weights=weights))
    if CACHED:
        assert counts == (1, 24 * WIDTH * 4, 0)


def test_a_parameter_that_was_made_in_inference_mode():
    """With indices of that mode, too, no key of autograd's is in the call."""
    results = []
    for device in (COMPUTE, OFFLOAD):
        with torch.inference_mode():
            weight, tokens = nn.Parameter(table(device)), index(5).clone()
        with torch.no_grad():
            results.append([F.embedding(tokens, weight), F.embedding_bag(tokens[None], weight), weight[tokens]])
    assert_same(results[1], results[0])


def test_a_table_that_is_a_conjugate():
    plain = torch.complex(table(CPU), table(CPU, seed=2))
    for view in (lambda w: w.conj(), lambda w: w.conj().imag):
        results = []
        for device in (COMPUTE, OFFLOAD):
            results.append(view(plain.to(device))[index(5)])
        assert_same(results[1], results[0])


def test_derivatives_of_every_kind():
    def run(device):
        weight, tangent = table(device).requires_grad_(), table(device, seed=5)

        def loss(w):
            return F.embedding(index(6), w).pow(3).sum()

        gradient = torch.func.grad(loss)(weight)
        _, forward = torch.func.jvp(loss, (weight.detach(),), (tangent,))
        second = torch.autograd.grad(loss(weight), weight, create_graph=True)[0]
        second.sum().backward()
        batched = torch.vmap(lambda i: F.embedding(i, weight.detach()))(index(3, 2))
        return gradient, forward, weight.grad, batched

    with deterministic():
        assert_same(run(OFFLOAD), run(COMPUTE))


def test_checkpointing_and_saved_tensor_hooks():
    def run(device):
        net = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 4))
        with torch.no_grad():
            net[0].weight.copy_(table(CPU))
            net[1].weight.copy_(at(CPU, 4, WIDTH))
            net[1].bias.zero_()
        net = net.to(device)
        for reentrant in (False, True):
            y = torch.utils.checkpoint.checkpoint(net, index(3, 2), use_reentrant=reentrant)
            if y.requires_grad:
                y.square().sum().backward()
        with torch.autograd.graph.save_on_cpu():
            y = net(index(3, 2, seed=4))
        y.square().sum().backward()
        return grads(net)

    with deterministic():
        assert_same(run(OFFLOAD), run(COMPUTE))


def test_autocast():
    def run(device):
        weight = table(device).requires_grad_()
        with torch.autocast(COMPUTE.type, dtype=torch.bfloat16):
            y = F.linear(F.embedding(index(6), weight), at(device, 8, WIDTH, seed=2))
        y.float().sum().backward()
        return y, weight.grad

    with deterministic():
        assert_same(run(OFFLOAD), run(COMPUTE))


@pytest.mark.skipif(not CACHED, reason="there is no cache")
def test_whoever_keeps_the_operand_is_told():
    kept = []

    class Keeps(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kept.extend(a for a in args if isinstance(a, torch.Tensor) and a.shape == (ROWS, WIDTH))
            return function(*args, **(kwargs or {}))

    weight = table(OFFLOAD)
    with Keeps():
        result = F.embedding(index(5), weight)
    assert kept
    says(
        RuntimeError,
        "offload: this tensor was the host bytes of an offload operand, for one operation that has looked up some of them, and "
        "has no memory since; read the operand itself.",
        lambda: kept[0].data_ptr(),
    )
    assert_same(result, F.embedding(index(5), table(COMPUTE)))


def test_an_index_that_is_wrong_is_an_error_as_ever():
    weight = table(OFFLOAD)
    if not GPU:  # where it ends the process's use of the device
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([ROWS]), weight)
    wrong = [
        lambda w: F.embedding(torch.tensor([0.5], device=COMPUTE), w),
        lambda w: w.index_select(2, index(3)),
        lambda w: torch.ops.aten.index(w, [index(3), index(3), index(3)]),
        lambda w: w[index(3), index(2)],
    ]
    for call in wrong:
        said = []
        for device in (COMPUTE, OFFLOAD):
            with pytest.raises((RuntimeError, IndexError)) as error:
                call(table(device))
            said.append((error.type, str(error.value).split("\n")[0]))
        assert said[0] == said[1]
    assert_same(F.embedding(index(5), weight), F.embedding(index(5), table(COMPUTE)))


@pytest.mark.gpu
def test_in_a_cuda_graph_it_is_fetched():
    weight, tokens = table(OFFLOAD), index(5)
    F.embedding(tokens, weight)
    before = torch_offload.stats()["reads_in_place"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = F.embedding(tokens, weight)
    assert torch_offload.stats()["reads_in_place"] == before  # a write would not wait for what replays read
    for seed in (3, 4):
        weight.copy_(table(CPU, seed=seed))
        graph.replay()
        assert_same(result, F.embedding(tokens, table(COMPUTE, seed=seed)))


@pytest.mark.gpu
def test_on_streams():
    weight = table(OFFLOAD)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for step in range(20):
        weight.copy_(table(CPU, seed=step))
        results = []
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000 * k)
                results.append(F.embedding(index(50, seed=k), weight))
        weight.zero_()
        torch.cuda.synchronize()
        for k, result in enumerate(results):
            assert_same(result, F.embedding(index(50, seed=k), table(COMPUTE, seed=step)))


@pytest.mark.gpu
def test_a_table_that_is_larger_than_the_gpu():
    _, total = torch.cuda.mem_get_info()
    width = 1024
    rows = (3 << 30) // (4 * width)
    weight = torch.empty(rows, width, device=OFFLOAD)
    weight[:, 0] = torch.arange(rows, device="cpu").float()
    torch.cuda.set_per_process_memory_fraction((2 << 30) / total)
    try:
        torch_offload.set_budget("auto")
        tokens = index(4096, rows=rows)
        result = F.embedding(tokens, weight)
        assert torch.equal(result[:, 0], tokens.float())
        with pytest.raises(torch.cuda.OutOfMemoryError):
            F.linear(torch.zeros(1, width, device=COMPUTE), weight)
        assert torch.equal(F.embedding(tokens, weight)[:, 0], tokens.float())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
