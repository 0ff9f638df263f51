"""The harness itself: it sees what is wrong, outlives what hangs, and holds the list of known differences to be true."""

import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import known
import pytest
import torch
from entry import Entry
from helpers import COMPUTE, CPU, assert_same
from pool import Pool
from truth import Draws, HostDraws, may_vary, varies


@dataclass
class Sample:
    input: torch.Tensor
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    broadcasts_input: bool = False

    def output_process_fn_grad(self, output: Any) -> Any:
        return output

    def noncontiguous(self) -> "Sample":
        def spread(x: torch.Tensor) -> torch.Tensor:
            return x.detach().repeat_interleave(2, dim=-1)[..., ::2].requires_grad_(x.requires_grad)

        return Sample(spread(self.input), tuple(spread(x) for x in self.args))


class Product:
    """An entry whose operation is x * y on the plain device, and something else where an operand is on offload."""

    name = "product"
    supports_autograd = supports_inplace_autograd = supports_out = True

    inplace_variant = None
    op = torch.mul

    def __init__(self, wrong: Callable[..., torch.Tensor]) -> None:
        self.wrong = wrong

    def __call__(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if "offload" in (x.device.type, y.device.type):
            return self.wrong(x, y, out)
        return torch.mul(x, y, out=out)

    def supported_dtypes(self, device: str) -> set[torch.dtype]:
        return {torch.float32}

    supported_backward_dtypes = supported_dtypes

    def sample_inputs(self, device: torch.device, dtype: torch.dtype, requires_grad: bool) -> list[Sample]:
        def values(*v: float) -> torch.Tensor:
            return torch.tensor(v, device=device, dtype=dtype).requires_grad_(requires_grad)

        return [Sample(values(1.0, 2.0, 0.0), (values(3.0, -1.0, 5.0),))]


def look(wrong: Callable[..., torch.Tensor]) -> tuple[set[str], dict[tuple[str, str], str]]:
    entry = Entry(Product(wrong), None, lambda mode, what: True)
    entry.look()
    assert not entry.plain_errors
    return {what for _, what in entry.counts}, entry.failures


class Shifted(torch.autograd.Function):
    """A product with another gradient."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y + 1e-3, g * x


WRONG = {
    "values": lambda x, y, out: torch.mul(x + 1e-6, y, out=out),
    "sign of zero": lambda x, y, out: (
        torch.mul(x, y, out=out) if out is not None else x * y * torch.tensor([1.0, 1.0, -1.0])
    ),
    "dtype": lambda x, y, out: torch.mul(x, y, out=out) if out is not None else (x * y).double(),
    "shape": lambda x, y, out: torch.mul(x, y, out=out) if out is not None else (x * y)[None],
    "device": lambda x, y, out: torch.mul(x, y, out=out) if out is not None else (x * y).to("meta").to("cpu"),
    "error": lambda x, y, out: x @ y[:2],
    "an operand": lambda x, y, out: torch.mul(x, y.data.mul_(1.5).div(1.5), out=out),
}


def test_right_is_right():
    looked, failures = look(lambda x, y, out: torch.mul(x, y, out=out))
    assert failures == {}
    assert looked == {"forward", "backward", "out", "noncontiguous"}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_results(name, gpu, monkeypatch):
    monkeypatch.setattr(sys.modules[Entry.__module__], "GPU", gpu)  # where more than one answer may be right
    _, failures = look(WRONG[name])
    assert {("mixed", "forward"), ("offload", "forward")} <= set(failures)


def test_wrong_gradient():
    _, failures = look(lambda x, y, out: Shifted.apply(x, y) if out is None else torch.mul(x, y, out=out))
    assert {mode for mode, what in failures if what == "backward"} == {"mixed", "offload"}
    assert all("gradient" in reason for reason in failures.values())
    assert ("offload", "forward") not in failures


def test_missing_gradient():
    _, failures = look(lambda x, y, out: (x * y).detach() if out is None else torch.mul(x, y, out=out))
    assert {what for _, what in failures} == {"backward", "noncontiguous"}


def test_wrong_out():
    _, failures = look(lambda x, y, out: x * y)
    assert {what for _, what in failures} == {"out"}


def test_a_worker_that_gives_no_answer_is_replaced():
    pool = Pool(1, 1, 0.0)
    try:
        answer = pool.submit("linalg.svd").result()
        assert "no answer within" in (answer["error"] or "".join(answer["failures"].values()))
        pool.limit = 60.0
        answer = pool.submit("add").result()
        assert answer["failures"] == {}
        assert answer["samples"]["mixed backward"] == 3, "one of real numbers, one of complex ones, one of bfloat16"
    finally:
        pool.close()


def test_a_worker_that_can_not_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "expecttest.py").write_text("raise ImportError('no such module here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RuntimeError, match=r"(?s)ended while it started .*no such module here"):
        Pool(1, 1, 60.0).names()


def answer(**failures: str) -> dict:
    return {"failures": {key.replace("_", " "): reason for key, reason in failures.items()}, "error": None}


def test_known_differences_are_strict(tmp_path):
    file = tmp_path / "known.toml"
    file.write_text(
        """
        [[difference]]
        entries = ["add"]
        modes = ["mixed"]
        what = ["forward", "out"]
        reason = "as it is"
        [[difference]]
        entries = ["add"]
        modes = ["offload"]
        what = ["forward"]
        torch = ">=2.15"
        unsteady = true
        reason = "since then"
        """
    )
    old, new = (known.load(file, version, False) for version in ("2.11.0+cu130", "2.15.0+cu132"))
    assert known.judge("add", answer(mixed_forward="x", mixed_out="y"), old, True) == []
    assert known.judge("add", answer(mixed_forward="x"), old, False) == []
    assert known.judge("add", answer(mixed_forward="x"), old, True) == [
        "mixed out: passes; take it out of " + known.FILE.name
    ]
    both = answer(mixed_forward="x", mixed_out="y", offload_forward="z")
    assert known.judge("add", both, old, True) == ["offload forward: z"]
    assert known.judge("add", both, new, True) == []
    assert known.judge("mul", answer(mixed_forward="x"), old, True) == ["mixed forward: x"]
    file.write_text(file.read_text().replace("out", "uot"))
    with pytest.raises(ValueError, match="unknown"):
        known.load(file)


ROOT = Path(__file__).parent.parent.parent
TOOL = runpy.run_path(str(ROOT / "tools/operators_table.py"))
PUBLISHED = TOOL["tables"]((ROOT / "docs/operators.md").read_text())


def test_the_published_list_is_the_one_that_is_kept():
    assert (ROOT / "docs/operators.md").read_text().endswith(TOOL["exceptions"]()), "run tools/operators_table.py again"
    record = {"a": answer(mixed_forward="x"), "b": answer()}
    for entry in record.values():
        entry["samples"] = {"mixed forward": 1, "offload out": 1}
    assert TOOL["runs"](record, "mixed") == (2, 1)
    assert TOOL["runs"](record, "offload", "out") == (2, 2)
    assert TOOL["share"](1000, 999) == "999 of 1,000 (99.9 %)"
    assert TOOL["share"](10000, 9999).endswith("(99.9 %)")


def test_a_table_below_the_goal_is_not_written(tmp_path):
    entries = {str(k): {"samples": {"mixed forward": 1, "offload forward": 1}, "failures": {}} for k in range(200)}
    for k in range(2):
        entries[str(k)]["failures"] = {"offload forward": "x"}
    assert TOOL["below_goal"](entries) == []
    entries["2"]["failures"] = {"offload forward": "x"}
    assert TOOL["below_goal"](entries) == ["offload"]
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"torch": "2.11", "device": "here", "whole": True, "of": 200, "entries": entries}))
    with pytest.raises(SystemExit, match="all on offload: less than 99 % of the entries pass"):
        TOOL["merged"]([str(file)])


@pytest.mark.parametrize("title", PUBLISHED)
def test_the_published_tables_keep_the_goal(title):
    """What fails is what is known to, neither more nor less; with what fails in some runs only, that is 1 % at most."""
    version, device = re.fullmatch(r"## torch (\S+), (.*)", title).groups()
    differences = known.load(version=version, gpu=not device.startswith("CPU"))
    counts = re.findall(r"\*\*all that applies\*\*(.*)", PUBLISHED[title])
    assert len(counts) == 2, "of operations and of modules"
    for modules, row in enumerate(counts):
        found = [[int(n.replace(",", "")) for n in pair] for pair in re.findall(r"\*\*([\d,]+) of ([\d,]+) \(", row)]
        for mode, (passed, looked) in zip(TOOL["MODES"], found, strict=True):
            mine = [k for k in differences if k.mode == mode and k.entry.startswith("module ") == bool(modules)]
            steady, every = {k.entry for k in mine if not k.unsteady}, {k.entry for k in mine}
            assert len(steady) <= looked - passed <= len(every), mode
            assert 100 * len(every) <= looked, f"{mode}: less than 99 % pass"


def test_the_published_tables_are_of_all_entries(pytestconfig):
    mine = [table for title, table in PUBLISHED.items() if title.startswith(f"## torch {torch.__version__}, ")]
    if not mine:
        pytest.skip("no table is of this torch")
    count = len(pytestconfig.opinfo_pool.names())
    assert [int(re.search(r"^Of ([\d,]+) entries", table, re.MULTILINE)[1]) for table in mine] == [count] * len(mine)


DRAWS = {
    "rand": lambda device: torch.rand(3, 4, device=device),
    "randint": lambda device: torch.randint(9, (5,), device=device),
    "randn_like": lambda device: torch.randn_like(torch.empty(4, device=device)),
    "uniform_": lambda device: torch.zeros(4, device=device).uniform_(1, 2),
    "module": lambda device: torch.nn.Linear(3, 2, device=device).weight.detach(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_on_the_host_are_the_hosts(name):
    torch.manual_seed(3)
    expected = DRAWS[name](CPU)
    torch.manual_seed(3)
    with HostDraws():
        actual = DRAWS[name](COMPUTE)
    assert actual.device == COMPUTE
    assert_same(actual, expected)


def test_draws_are_seen():
    """Also where the numbers make no difference."""
    with Draws() as draws:
        torch.ones(3).cumsum(0)
    assert not draws.seen
    with draws:
        torch.nn.functional.fractional_max_pool2d(torch.ones(1, 4, 4), 2, output_size=2)
    assert draws.seen


def test_what_varies_is_found_out():
    assert not varies(lambda: 1, lambda found: found == 1)
    assert varies(iter(range(100)).__next__, lambda found: found == 0)


def test_what_may_vary_is_told_by_pytorch():
    assert not may_vary(lambda: torch.ones(3).cumsum(0))
    assert may_vary(lambda: torch.ones(2).put_(torch.tensor([0, 0]), torch.ones(2)))  # also on the CPU
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("error", "found"), [(0.0, set()), (1e-6, set()), (1e-2, {"forward"})])
def test_what_may_vary_is_nearly_the_same(error, found, monkeypatch):
    entry = sys.modules[Entry.__module__]
    monkeypatch.setattr(entry, "GPU", True)
    monkeypatch.setattr(entry, "may_vary", lambda run: True)
    _, failures = look(lambda x, y, out: torch.mul(x, y, out=out) if out is not None else x * y * (1 + error))
    assert {what for _, what in failures} & {"forward"} == found
