"""Lookups in large tables within compiled graphs: inductor's read rows where they are, as those of a plain program do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import CACHED, COMPUTE, CPU, GPU, OFFLOAD, Tied, assert_same, grads
from tables import ROWS, TABLE, WIDTH, index, nothing_fits, read, table  # noqa: F401
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import torch_offload

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint16]

# By name: the call, and how many rows it reads.
LOOKUPS = {
    "embedding": (lambda w, i: F.embedding(i(3, 5), w), 15),
    "embedding padded": (lambda w, i: F.embedding(i(9), w, padding_idx=3), 9),
    "index": (lambda w, i: w[i(2, 3)], 6),
    "index from the end": (lambda w, i: w[-1 - i(6)], 6),
    "index of a permuted index": (lambda w, i: w[i(2, 3).t()], 6),
    "index int32": (lambda w, i: w[i(4).int()], 4),
    "index_select": (lambda w, i: w.index_select(0, i(7)), 7),
    "of three dimensions": (lambda w, i: w.view(-1, 4, WIDTH)[i(5, rows=ROWS // 4)], 20),
    "of a view": (lambda w, i: F.embedding(i(5, rows=ROWS // 2), w[ROWS // 2 :]), 5),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_are_read_where_they_are(name, backend):
    call, rows = LOOKUPS[name]
    asked = []
    call(table(COMPUTE), lambda *shape, **options: asked.append(index(*shape, **options)) or asked[-1])

    def step(weight, given):
        return torch.tanh(call(weight, lambda *shape, **options: given) * 2)

    weight, run, results = table(OFFLOAD), compiled(step, backend), []
    counts = read(lambda: results.append(run(weight, asked[0])))
    assert_same(results[0], compiled(step, backend)(table(COMPUTE), asked[0]))
    assert results[0].device == COMPUTE
    if CACHED and backend == "inductor":
        assert counts == (1, rows * WIDTH * 4, 0), "the table was copied"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    weight, results = (table(CPU, rows=4 * ROWS) * 10).to(torch.int8).to(dtype), []
    run, moved = compiled(lambda w, i: (w[i].float() * 2, w[i + 1]), "inductor"), weight.to(OFFLOAD)
    counts = read(lambda: results.append(run(moved, index(5))))
    assert_same(results[0], (weight[index(5).cpu()].float() * 2, weight[index(5).cpu() + 1]))
    if CACHED and dtype is not torch.uint16:  # of which CUDA looks up rows in generated code alone
        assert counts == (2, 10 * max(WIDTH * dtype.itemsize, 128), 0)


FETCHED = {
    "numbers that lie apart": lambda w, i: w[:, i[:2] % WIDTH],
    "numbers": lambda w, i: w[i, i % WIDTH],
    "a mask": lambda w, i: torch.where((i < 5)[:, None], w[:5], 0),
    "rows that lie apart": lambda w, i: F.embedding(i % WIDTH, w.t()),
    "a small table": lambda w, i: F.embedding(i % 64, w[:64]),
    "most rows": lambda w, i: F.embedding(i.repeat(ROWS // 8 + 1)[: ROWS - 5], w),
    "most rows together": lambda w, i: w[i.repeat(ROWS // 15)] + w[i.flip(0).repeat(ROWS // 15)],
    "one row, repeated": lambda w, i: w[:1].expand(ROWS, WIDTH)[i],
    "columns of matrices": lambda w, i: w.view(-1, 4, WIDTH // 4).transpose(1, 2)[i % 4096],
    "channels last": lambda w, i: w.view(-1, 4, 4, WIDTH // 4).permute(0, 3, 1, 2)[i % 4096],
}


@pytest.mark.skipif(not CACHED, reason="there is no cache")
@pytest.mark.parametrize("name", FETCHED)
def test_all_else_is_fetched(name):
    weight, results = table(OFFLOAD), []
    run = compiled(FETCHED[name], "inductor")
    count, _, moved = read(lambda: results.extend(run_and_get_code(run, weight, index(5))))
    assert count == 0
    assert "offload.look_up" not in results[1][0], "the lookup is in no kernel"
    assert moved > 0
    assert_same(results[0], FETCHED[name](table(COMPUTE), index(5)))


def test_training_sees_every_update():
    """The same values as where all of it is on the device, and steps on the host that write to what was read."""
    plain = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3)).to(
        COMPUTE
    )
    net = copy.deepcopy(plain).to(OFFLOAD)
    step, expected = compiled(net, "inductor"), compiled(plain, "inductor")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        plain.load_state_dict({name: value.to(CPU) for name, value in net.state_dict().items()})
        results = []
        counts = read(lambda results=results, seed=seed: results.append(step(index(4, 7, seed=seed))))
        results.append(expected(index(4, 7, seed=seed)))
        assert_same(results[0], results[1])
        for module, result in ((net, results[0]), (plain, results[1])):
            module.zero_grad()
            result.square().mean().backward()
        assert_same(grads(net), grads(plain))
        optimizer.step()
        if CACHED:
            assert counts[:2] == (1, 28 * WIDTH * 4)
            assert counts[2] < TABLE


def test_generated_code_may_be_cpp():
    def call(weight, tokens):
        return F.embedding(tokens, weight) * 2 + weight[-1 - tokens]

    results, weight = [], table(OFFLOAD)
    with inductor_config.patch(cpp_wrapper=True):
        run = compiled(call, "inductor")
        counts = read(lambda: results.append(run(weight, index(2, 5))))
    assert_same(results[0], call(table(COMPUTE), index(2, 5)))
    if CACHED:
        assert counts == (2, 20 * WIDTH * 4, 0)


@pytest.mark.skipif(not CACHED, reason="there is no cache")
def test_a_budget_changes_what_is_read_and_no_graph():
    weight, step = nn.Parameter(table(OFFLOAD)), compiled(lambda w, i: F.embedding(i, w) + 1, "inductor")
    with torch.no_grad():
        assert read(lambda: step(weight, index(5))) == (1, 5 * WIDTH * 4, 0)
        made = counters["stats"]["unique_graphs"]
        torch_offload.set_budget(64 * TABLE)
        assert read(lambda: step(weight, index(5)))[::2] == (0, TABLE)
        assert read(lambda: step(weight, index(5)))[0] == 0
        torch_offload.set_budget(0)
        torch_offload.empty_cache()
        assert read(lambda: step(weight, index(5))) == (1, 5 * WIDTH * 4, 0)
        assert counters["stats"]["unique_graphs"] == made


def test_any_number_of_rows():
    weight, step = table(OFFLOAD), compiled(lambda w, i: F.embedding(i, w).sum(-1), "inductor", dynamic=True)
    plain = compiled(lambda w, i: F.embedding(i, w).sum(-1), "inductor", dynamic=True)
    for count in (3, 17, 200, ROWS - 3):
        results = []
        counts = read(lambda count=count, results=results: results.append(step(weight, index(count))))
        assert_same(results[0], plain(table(COMPUTE), index(count)))
        if CACHED:
            assert counts[0] == (count <= ROWS // 2)


def test_a_tied_head():
    plain = Tied(ROWS, WIDTH).to(COMPUTE)
    net = copy.deepcopy(plain).to(OFFLOAD)
    step, expected = compiled(net, "inductor"), compiled(plain, "inductor")
    for seed in range(2):
        results = [module(index(3, 4, seed=seed)) for module in (step, expected)]
        for result in results:
            result.square().mean().backward()
        assert_same(results[0], results[1])
        assert_same(grads(net), grads(plain))


def test_a_graph_that_writes_to_the_table():
    def step(weight, tokens):
        before = weight[tokens]
        weight.mul_(2)
        weight[tokens] = before + 1
        return before, weight[tokens], F.embedding(tokens, weight).sum()

    results = []
    for device in (COMPUTE, OFFLOAD):
        weight, run, found = table(device), compiled(step, "inductor"), []
        counts = read(lambda w=weight, run=run, found=found: found.append(run(w, index(5))))
        results.append([found, weight])
    assert_same(results[1], results[0])
    if CACHED:
        assert counts[0] == 1, "it read before the write, where the table is"


@pytest.mark.gpu
def test_with_cuda_graphs_it_is_fetched():
    """A write would not wait for what replays read."""
    step = compiled(lambda w, i: F.embedding(i, w) * 2, "inductor", mode="reduce-overhead")
    weight = nn.Parameter(table(OFFLOAD), requires_grad=False)
    for seed in range(4):
        weight.copy_(table(OFFLOAD, seed=seed))
        results = []
        assert (
            read(lambda seed=seed, results=results: results.append(step(weight, index(5, seed=seed)).clone()))[0] == 0
        )
        assert_same(results[0], table(COMPUTE, seed=seed)[index(5, seed=seed)] * 2)


@pytest.mark.skipif(GPU, reason="an index that is wrong ends the process's use of the device")
def test_an_index_that_is_wrong_is_an_error():
    step, weight = compiled(lambda w, i: F.embedding(i, w) + 1, "inductor"), table(OFFLOAD)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        step(weight, torch.tensor([ROWS]))
    assert_same(step(weight, index(5)), F.embedding(index(5), table(COMPUTE)) + 1)
