"""CUDA graphs with fetches of offload tensors: replays see what the host has by then, and compute what plain graphs do."""

import copy
import functools
import gc
import threading

import pytest
import torch
from compiling import fresh_compiler  # noqa: F401 - a fixture for all tests
from helpers import COMPUTE, OFFLOAD, assert_same, at, data, layers
from torch import nn

import torch_offload

pytestmark = pytest.mark.gpu
WIDTH = 64


@pytest.fixture(autouse=True)
def settings_as_they_were():
    ring = torch_offload.get_ring_bytes()
    yield
    torch_offload.set_budget("auto")
    torch_offload.set_ring_bytes(ring)
    torch_offload.set_gpu_steps(False)


def captured(function, *inputs):
    """A graph of it, its inputs and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(*inputs)
    return graph, results


def pair(count=4, width=WIDTH):
    torch.manual_seed(0)
    plain = layers(count, width).requires_grad_(False)
    return plain, copy.deepcopy(plain).to(OFFLOAD), plain.to(COMPUTE)


@pytest.mark.parametrize("budget", ["auto", 0])
@pytest.mark.parametrize("ring", [None, 40_000], ids=["a large ring", "a small ring"])
def test_new_inputs_and_new_weights(budget, ring):
    torch_offload.set_budget(budget)
    if ring is not None:
        torch_offload.set_ring_bytes(ring)
    _, model, plain = pair(8)
    x = data(3, WIDTH)
    graph, y = captured(model, x)
    for k in range(100):
        x.copy_(data(3, WIDTH, seed=k))
        if k % 2:
            for changed in (plain, model):
                changed.load_state_dict({name: 0.9 * value for name, value in changed.state_dict().items()})
        graph.replay()
        assert_same(y.clone(), plain(x))
        assert_same(model(x), plain(x))


def test_writes_right_before_and_right_behind_a_replay():
    weight, x = at(OFFLOAD, 2048, 2048), data(2048, 2048)
    graph, y = captured(torch.matmul, x, weight)
    values = [at("cpu", 2048, 2048, seed=k) for k in range(4)]
    results = []
    for value in values:
        weight.copy_(value)
        graph.replay()
        weight.zero_()
        results.append(y.clone())
    for result, value in zip(results, values, strict=True):
        assert_same(result, x @ value.to(COMPUTE))


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_optimizer_steps_between_replays(where):
    torch_offload.set_gpu_steps(where == "gpu")
    torch.manual_seed(0)
    model = layers(3, 256).to(OFFLOAD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = data(16, 256)

    def forward(x):
        with torch.no_grad():
            return model(x)

    graph, y = captured(forward, x)
    there = torch_offload.stats()["updates"]
    for _ in range(5):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        graph.replay()
        assert_same(y.clone(), forward(x))
    assert (torch_offload.stats()["updates"] > there) == (where == "gpu")


@pytest.mark.memcheck
def test_make_graphed_callables():
    _, model, plain = pair()
    x = data(3, WIDTH)
    graphed = torch.cuda.make_graphed_callables(model, (x.clone(),))
    for k in range(4):
        x = data(3, WIDTH, seed=k)
        assert_same(graphed(x).clone(), plain(x))


@torch.no_grad()
def test_a_compiled_model():
    _, model, _ = pair()
    step = torch.compile(model, fullgraph=True)
    x = data(3, WIDTH)
    graph, y = captured(step, x)
    for k in range(3):
        x.copy_(data(3, WIDTH, seed=k))
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
        graph.replay()
        assert_same(y.clone(), step(x))


class LoRA(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(at(COMPUTE, rank, base.in_features))
        self.b = nn.Parameter(at(COMPUTE, base.out_features, rank, seed=1))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


def test_training_of_what_is_on_cuda_over_frozen_weights():
    """Forward and backward are captured; the backward fetches anew."""
    plain, model, _ = pair(3)
    found = []
    for base in (plain.to(COMPUTE), model):
        wrapped = nn.Sequential(*[LoRA(m) if isinstance(m, nn.Linear) else m for m in base])
        x = data(3, WIDTH).requires_grad_()
        step = torch.cuda.make_graphed_callables(wrapped, (x,), allow_unused_input=True)
        gradients = []
        for k in range(3):
            x = data(3, WIDTH, seed=k).requires_grad_()
            step(x).square().mean().backward()
            gradients += [x.grad.clone(), *[p.grad.clone() for p in wrapped.parameters() if p.requires_grad]]
        found.append(gradients)
    assert_same(found[1], found[0])


def test_graphs_share_memory_and_give_it_back():
    weights = [at(OFFLOAD, 512, 512, seed=k) for k in range(16)]
    x = data(512, 512)

    def multiplied(first, operands=weights):  # not a product of matrices, for which every graph gets a workspace
        return functools.reduce(torch.mul, operands, first)

    expected = multiplied(x, [weight.to(COMPUTE) for weight in weights])
    multiplied(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    one = captured(multiplied, x)
    used = torch.cuda.memory_allocated() - before
    assert used > 15 << 20
    several = [captured(multiplied, x) for _ in range(3)]
    assert torch.cuda.memory_allocated() - before < used + (8 << 20), "the results"
    for graph, y in (one, *several, one):
        y.zero_()
        graph.replay()
        assert_same(y.clone(), expected)
    del one, several, graph, y
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def product(first, operands):
    return functools.reduce(torch.matmul, operands, first)


def test_a_replay_on_another_stream():
    weights = [at(OFFLOAD, 1024, 1024, seed=k) for k in range(4)]
    plain = [weight.to(COMPUTE) for weight in weights]
    x = data(1024, 1024)
    graph, y = captured(functools.partial(product, operands=weights), x)
    other, z = captured(functools.partial(product, operands=weights[::-1]), x)
    side = torch.cuda.Stream()
    for _ in range(3):
        graph.replay()
        with torch.cuda.stream(side):
            other.replay()
    torch.cuda.synchronize()
    assert_same(y.clone(), product(x, plain))
    assert_same(z.clone(), product(x, plain[::-1]))


def test_replays_from_several_threads():
    weights = [at(OFFLOAD, 512, 512, seed=k) for k in range(6)]
    plain = [weight.to(COMPUTE) for weight in weights]
    x = data(512, 512)
    graphs = [captured(functools.partial(product, operands=weights[k:] + weights[:k]), x) for k in range(3)]
    expected = [product(x, plain[k:] + plain[:k]) for k in range(3)]
    failures = []

    def replays(k):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph, y = graphs[k]
                for _ in range(20):
                    graph.replay()
                    assert_same(y.clone(), expected[k])
        except BaseException as failure:
            failures.append(failure)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=replays, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def refuses(function, *inputs, match):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=match), torch.cuda.graph(graph):
        function(*inputs)


def test_what_would_be_done_once_is_refused():
    weight, x = at(OFFLOAD, 8, 8), data(8, 8)
    expected = weight.cpu()
    refuses(weight.add_, 1, match="on the host while a CUDA graph is being captured")
    refuses(weight.cpu, match="on the host while a CUDA graph is being captured")
    refuses(weight.copy_, x, match="can't copy into an offload tensor while a CUDA graph is being captured")
    refuses(weight.mul_, weight, match="while a CUDA graph is being captured")
    assert_same(weight.cpu(), expected)
    assert_same(x @ weight, x @ expected.to(COMPUTE))


def test_gradients_that_would_go_home_are_refused():
    model, x = layers(2, 8).to(OFFLOAD), data(3, 8)
    expected = model(x)
    with pytest.raises(RuntimeError, match="while a CUDA graph is being captured"):
        torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))
    assert_same(model(x), expected)


def test_memory_that_is_not_page_locked(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": at("cpu", 64, 64)}, tmp_path / "weights.safetensors")
    weight = torch_offload.load(tmp_path / "weights.safetensors", mmap=True)["weight"]
    x = data(8, 64)
    refuses(torch.matmul, x, weight, match=r"not page-locked.*clone\(\)")
    own = weight.clone()
    graph, y = captured(torch.matmul, x, own)
    graph.replay()
    assert_same(y.clone(), x @ weight)


def test_a_graph_outlives_its_tensors():
    weight, x = at(OFFLOAD, 64, 64), data(8, 64)
    expected = x @ weight
    graph, y = captured(torch.matmul, x, weight)
    del weight
    gc.collect()
    others = [at(OFFLOAD, 64, 64, seed=k) for k in range(8)]
    graph.replay()
    assert_same(y.clone(), expected)
    del others


def test_a_graph_that_is_captured_anew():
    weight, x = at(OFFLOAD, 64, 64), data(8, 64)
    graph, y = captured(torch.matmul, x, weight)
    graph.reset()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    assert_same(y.clone(), x + 1)
