"""torch.export of an offload model, and what is left of it after run_decompositions()."""

import copy
import io

import pytest
import torch
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, OFFLOAD, assert_same, data
from torch import nn


class Parts(nn.Module):
    """Composite operations, views of weights, statistics that are written, and weights alone."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv, self.embedding = nn.Linear(8, 8), nn.Conv1d(4, 4, 3), nn.Embedding(5, 8)
        self.norm, self.statistics = nn.LayerNorm(8), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.conv(self.linear(x)).relu() @ self.linear.weight[:6]
        y = nn.functional.scaled_dot_product_attention(y, self.norm(y), y) + self.embedding.weight[0] * 2
        return self.statistics(y)


def targets(program):
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("device", [COMPUTE, OFFLOAD], ids=["beside", "alone"])
@pytest.mark.parametrize("table", [None, {}], ids=["core", "composites"])
def test_decomposed_program(table, device, training, strict):
    """Of statistics, the program has what the exported one has: PyTorch drops what isn't read."""
    torch.manual_seed(0)
    plain = Parts().train(training).to(COMPUTE)
    model, runs = copy.deepcopy(plain).to(OFFLOAD), []
    for each, place in ((plain, COMPUTE), (model, device)):
        program = torch.export.export(each, (data(2, 4, 8).to(place),), strict=strict).run_decompositions(table)
        assert (torch.ops.aten.linear.default in targets(program)) == (table is not None)
        assert (torch.ops.offload.fetch.default in targets(program)) == (each is model)
        runs.append(program.module())
    expected, run = runs
    for seed in range(2):
        x = data(2, 4, 8, seed=seed)
        result = run(x.to(device))
        assert result.device.type == device.type
        assert_same(result, expected(x))
    assert_same(dict(run.named_buffers()), dict(expected.named_buffers()))
    torch.testing.assert_close(result.to(COMPUTE), plain(x))


@torch.no_grad()
def test_a_decomposed_program_is_saved():
    torch.manual_seed(0)
    plain = Parts().eval().to(COMPUTE)
    model, x = copy.deepcopy(plain).to(OFFLOAD), data(2, 4, 8)
    expected, program = (torch.export.export(each, (x,)).run_decompositions().module() for each in (plain, model))
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)).run_decompositions(), file)
    file.seek(0)
    for run in (program, torch.export.load(file).module()):
        assert {value.device.type for value in run.state_dict().values()} == {"offload"}
        assert_same(run(x), expected(x))
        for backend in BACKENDS:
            assert_same(compiled(run, backend)(x), compiled(expected, backend)(x))


def test_a_decomposed_program_is_trained():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).to(COMPUTE)
    found = []
    for model in (plain, copy.deepcopy(plain).to(OFFLOAD)):
        run = torch.export.export(model, (data(2, 8),)).run_decompositions().module()
        run(data(2, 8)).square().sum().backward()
        assert {value.grad.device.type for value in run.parameters()} == {model[0].weight.device.type}
        found.append({name: value.grad for name, value in run.named_parameters()})
    assert_same(found[1], found[0])
