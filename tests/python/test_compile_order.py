"""The order of inductor's graphs: fetches come late and gradients go home early, though the memory asks for neither."""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from compiling import compiled, fresh_compiler  # noqa: F401
from helpers import OFFLOAD, data
from torch import nn
from torch._inductor.utils import run_and_get_code

from torch_offload.compile.order import arrange

GIVE = SimpleNamespace(op_overload=torch.ops.offload.give.coded)
OTHER = SimpleNamespace(op_overload=None)


class Node:
    """What a node of inductor's scheduler tells."""

    def __init__(self, name, before=(), kind="kernel"):
        self.name, self.kind, self.node = name, kind, GIVE if kind == "give" else OTHER
        self.mpi_node = SimpleNamespace(pred_nodes=set(before), succ_nodes=set())
        for other in before:
            other.mpi_node.succ_nodes.add(self)

    def __repr__(self):
        return self.name

    def get_buffer_names(self):
        return {self.name}


def is_fetch(node):
    return node.kind == "fetch"


def names(nodes):
    return [node.name for node in nodes]


def test_gradients_come_between_what_they_are_made_of():
    """Three layers, all of whose gradients come last."""
    w3, w2, w1 = (Node(f"w{k}", kind="fetch") for k in (3, 2, 1))
    d3 = Node("d3", [w3])
    d2 = Node("d2", [w2, d3])
    d1 = Node("d1", [w1, d2])
    g3, g2, g1 = (Node(f"g{k}", [d]) for k, d in ((3, d3), (2, d2), (1, d1)))
    s3, s2, s1 = (Node(f"s{k}", [g], "give") for k, g in ((3, g3), (2, g2), (1, g1)))
    order = arrange([w3, w2, w1, d3, d2, d1, g1, s1, g2, s2, g3, s3], set(), is_fetch)
    assert names(order) == ["w3", "d3", "g3", "s3", "w2", "d2", "g2", "s2", "w1", "d1", "g1", "s1"]


def test_a_sum_waits_for_its_last_term():
    """Of a weight that is used twice the first gradient would only wait, and take memory."""
    first = Node("first")
    second = Node("second", [first])
    one, other = Node("one", [first]), Node("other", [second])
    both = Node("both", [one, other])
    give = Node("give", [both], "give")
    order = arrange([first, second, other, one, both, give], set(), is_fetch)
    assert names(order) == ["first", "second", "other", "one", "both", "give"]


def test_what_the_graph_returns_stays_where_it_is():
    first = Node("first")
    result = Node("result", [first])
    give = Node("give", [result], "give")
    second = Node("second", [first])
    assert names(arrange([first, second, result, give], {"result"}, is_fetch)) == ["first", "second", "result", "give"]
    assert names(arrange([first, second, result, give], set(), is_fetch)) == ["first", "result", "give", "second"]


def test_a_fetch_that_only_a_gradient_needs():
    """As of a weight that is normed: it comes with the gradient, behind a write that it has to see."""
    write = Node("write")
    weight = Node("weight", [write], "fetch")
    first = Node("first")
    gradient = Node("gradient", [first, weight])
    give = Node("give", [gradient], "give")
    last = Node("last", [first])
    order = arrange([first, last, write, weight, gradient, give], set(), is_fetch)
    assert names(order) == ["first", "last", "write", "weight", "gradient", "give"]
    order = arrange([write, first, weight, last, gradient, give], set(), is_fetch)
    assert names(order) == ["write", "first", "weight", "gradient", "give", "last"]


def random_graph(draw):
    nodes = []
    for k in range(draw.randint(1, 30)):
        kind = draw.choice(["fetch", "kernel", "kernel", "kernel", "give"])
        some = [node for node in nodes if node.kind != "give" or draw.random() < 0.1]
        before = draw.sample(some, min(len(some), draw.randint(0, 1 if kind == "fetch" else 3)))
        nodes.append(Node(f"{kind}{k}", before, kind))
    # In any order that their edges allow.
    order, left = [], list(nodes)
    while left:
        ready = [node for node in left if node.mpi_node.pred_nodes.issubset(order)]
        order.append(draw.choice(ready))
        left.remove(order[-1])
    return order


@pytest.mark.parametrize("seed", range(200))
def test_random_graphs(seed):
    draw = random.Random(seed)
    order = random_graph(draw)
    results = {node.name for node in order if draw.random() < 0.1}
    arranged = arrange(order, results, is_fetch)
    assert sorted(names(arranged)) == sorted(names(order))
    place = {node: k for k, node in enumerate(arranged)}
    for node in arranged:
        assert all(place[other] < place[node] for other in node.mpi_node.pred_nodes), (node, names(arranged))
        if is_fetch(node) and node.mpi_node.succ_nodes:
            first = min(map(place.__getitem__, node.mpi_node.succ_nodes))
            between = arranged[place[node] + 1 : first]
            assert all(map(is_fetch, between)), (node, names(arranged))


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("tokens", [1, 3, 512])
@pytest.mark.parametrize("input_grad", [True, False], ids=["x.grad", "no x.grad"])
@pytest.mark.parametrize(
    ("make", "most"),
    [(lambda: nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()), 2), (lambda: Gated(64), 4)],
    ids=["linear", "gated"],
)
def test_gradients_go_home_while_weights_come(make, most, input_grad, tokens):
    """Else a backward's copies up the link begin where those down it end."""
    net = nn.Sequential(*[make() for _ in range(8)]).to(OFFLOAD)
    step, x = compiled(net, "inductor", dynamic=False), data(tokens, 64).requires_grad_(input_grad)
    _, codes = run_and_get_code(lambda: step(x).sum().backward())
    calls = re.findall(r"= torch\.ops\.offload\.(fetch|give)\.coded\(", codes[-1])
    matrices = sum(parameter.dim() == 2 for parameter in net.parameters())
    assert calls.count("give") == len(list(net.parameters()))
    assert matrices - 1 <= calls.count("fetch") <= len(list(net.parameters()))
    ahead = 0
    for call in calls:
        ahead += 1 if call == "fetch" else -1
        assert ahead <= most, calls
