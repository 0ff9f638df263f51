"""Every benchmark runs in a small version, to its end, and writes its figures."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GPU

pytestmark = pytest.mark.once

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = [
    "activations",
    "arena",
    "autocast",
    "batches",
    "compile",
    "embeddings",
    "exactness",
    "forward",
    "graphs",
    "load",
    "lookup",
    "memory",
    "optimizer",
    "overhead",
    "placement",
    "residency",
    "training",
]


def test_every_benchmark_is_here() -> None:
    shared = {"blocks", "harness", "peers"}
    assert sorted({path.stem for path in BENCHMARKS.glob("*.py")} - shared) == NAMES


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A benchmark's module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return benchmark


def figures(name: str, folder: Path, *options: str, **settings: str) -> dict[str, Any]:
    """What a small version writes, which must succeed."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--tiny", *options]
    environment = os.environ | {"OUT": str(folder)} | settings
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((folder / f"{name}.json").read_text())
    assert record["machine"]["torch"]
    return record


@pytest.mark.extra
@pytest.mark.parametrize("name", NAMES)
def test_a_small_version_runs(name: str, tmp_path: Path) -> None:
    assert all(run.get("equal", True) for run in figures(name, tmp_path).get("runs", []))


@pytest.mark.extra
@pytest.mark.skipif(GPU, reason="runs from a process without a GPU")
@pytest.mark.parametrize("name", ["batches", "forward", "memory", "residency", "training"])
def test_a_small_version_runs_where_there_is_a_cache(name: str, tmp_path: Path) -> None:
    found = figures(name, tmp_path, TORCH_OFFLOAD_LINK="sim")
    assert all(run.get("equal", True) for run in found.get("runs", []))
    if name == "memory":
        assert all(run["slots"] > 0 for run in found["runs"])


@pytest.mark.skipif(GPU, reason="runs from a process without a GPU")
@pytest.mark.parametrize("saved", [None, "everything", "automatic", "1e-5"])
def test_every_bit_is_equal_with_late_copies_on_the_simulated_link(tmp_path: Path, saved: str | None) -> None:
    options = ["--delay", "100", "--poison", *(["--saved", saved] if saved else [])]
    record = figures("exactness", tmp_path, *options, TORCH_OFFLOAD_LINK="sim", TORCH_OFFLOAD_SEED="13")
    assert record["wrong"] == {"torch.float32": 0, "torch.bfloat16": 0, "torch.float16": 0}
    assert (record["delay_us"], record["poison"], record["saved"]) == (100, True, saved)
    assert (record["stats"]["host.activation_bytes.peak"] > 0) == (saved is not None)
    settings = record["machine"]["environment"]
    assert (
        settings.items()
        >= {
            "TORCH_OFFLOAD_COPY_DELAY_US": "100",
            "TORCH_OFFLOAD_POISON": "1",
            "TORCH_OFFLOAD_EVICT": "1",
        }.items()
    )
    assert record["stats"]["link.copies_to_device"] > 0
    assert record["stats"]["link.copies_to_host"] > 0


@pytest.mark.parametrize(
    ("options", "rates", "sizes", "missed"),
    [
        ([], [6.0, 9.0], [1.03], None),
        ([], [9.0, 5.9], [1.0], "less than 6 times the rate"),
        ([], [6.0], [1.0, 1.031], "more than 1.03 times the bytes"),
        ([], [5.9], [1.031], "less than 6 times the rate.*\nmore than 1.03 times the bytes"),
        (["--tiny"], [5.9], [1.0], None),
        (["--tiny"], [5.9], [1.031], "^more than 1.03 times the bytes"),
    ],
)
def test_the_exit_of_arena_tells_a_missed_goal(options, rates, sizes, missed, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = load("arena", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["arena.py", *options])
    monkeypatch.setattr(arena, "compute_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(arena, "compare_rates", lambda *_: [{"ratio": ratio} for ratio in rates])
    monkeypatch.setattr(arena, "compare_bytes", lambda *_: [{"ratio": ratio} for ratio in sizes])
    monkeypatch.setattr(arena, "write_record", lambda *_: None)
    if missed is None:
        arena.main()
    else:
        with pytest.raises(SystemExit, match=missed) as exited:
            arena.main()
        assert isinstance(exited.value.code, str)  # which makes the status 1


def record(variant: str = "offload", tokens: int = 4096, **figures: Any) -> dict[str, Any]:
    return {"variant": variant, "tokens": tokens, "equal": True, "off_by": 0.0} | figures


def call(operation: str, more: float, mode: str = "no_grad") -> dict[str, Any]:
    return {"operation": operation, "mode": mode, "plain_us": 4.0, "offload_us": 4.0 + more}


def run(budget: str, median: float, tokens: int = 2048, **figures: Any) -> dict[str, Any]:
    return {
        "budget": budget,
        "tokens": tokens,
        "seconds": {"median": median},
        "resident": 0.02,
        "equal": True,
    } | figures


def lowered(part: str, ratio: float | None, equal: bool = True) -> dict[str, Any]:
    return {"part": part, "tokens": 2048, "variant": "offload", "ratio": ratio, "equal": equal}


def streamed(prefetch: bool, ratio: float, size: int = 1 << 20, equal: bool = True) -> dict[str, Any]:
    return {"size": size, "prefetch": prefetch, "ratio": ratio, "equal": equal}


def stepped(algorithm: str, median: float, place: str = "offload") -> dict[str, Any]:
    return {"place": place, "algorithm": algorithm, "median": median}


def trained(part: float, dtype: str = "torch.bfloat16", algorithm: str = "default") -> list[dict[str, Any]]:
    both = {"as it is": 0.5 * part, "with waits": 0.5}
    return [
        {"dtype": dtype, "algorithm": algorithm, "variant": name, "median": median} for name, median in both.items()
    ]


def fed(slower: float, work: str, budget: str = "automatic", to: str = "offload", equal: bool = True) -> dict[str, Any]:
    return {"work": work, "budget": budget, "fed": to, "slower than plain": slower, "equal": equal}


ALONE = [
    stepped("default", 0.11),
    stepped("on the GPU", 0.9),
    stepped("fused", 0.1, "cpu"),
    stepped("default", 1, "cpu"),
]
TRAINED = [
    *(trained(0.82) + trained(0.82, algorithm="fused") + trained(0.99, algorithm="on the GPU")),
    *(trained(0.78, "torch.float32") + trained(0.78, "torch.float32", "fused")),
]
BUDGETS = [
    *(run("0", 0.1), run("half", 0.055), run("auto", 0.0204), run("auto, full GPU", 0.042, ideal=0.04)),
    *(run("0", 0.1, tokens=1), run("auto", 0.026, tokens=1)),
]
MOVED = {"bytes": 2**32, "bytes_down": 0, "bytes_up": 2**32}
STEPS = [run("", 1.02, variant="offload", ideal=1.0, **MOVED)]
FORWARD_GOALS = {1: 0.99, 2048: 0.99, 8192: 0.97, 16384: 0.97, 32768: 0.99}
TRAINING_GOALS = {4096: 0.97, 16384: 0.98}
FORWARD, BOTH, GENERATE = "forward, 4096 tokens", "forward and backward, 4096 tokens", "generate(), 32 tokens after 128"
FED = [
    *(fed(1.1, work) for work in (FORWARD, BOTH, GENERATE)),
    *(fed(1.25, FORWARD, "half"), fed(9.0, BOTH, "half"), fed(9.0, GENERATE, "half")),
    *(fed(9.0, "forward, 1 tokens"), fed(9.0, BOTH, "0"), fed(9.0, FORWARD, to="resident")),
]


@pytest.mark.parametrize(
    ("name", "records", "missed"),
    [
        ("forward", [[record(tokens=2048, ratio=0.99), record("RamTorch", 2048, ratio=0.5)]], []),
        *(
            (
                name,
                [[record(tokens=tokens, ratio=goal - 0.001)]],
                [f"{tokens} tokens: {goal - 0.001:.3f} of the ideal, and not {goal}."],
            )
            for name, goals in [("forward", FORWARD_GOALS), ("training", TRAINING_GOALS)]
            for tokens, goal in goals.items()
        ),
        (
            "forward",
            [[record(tokens=1, ratio=1.0, equal=False)]],
            ["1 tokens: the output differs from the resident model's."],
        ),
        ("training", [[record(ratio=0.97), record("resident", ratio=0.5)]], []),
        (
            "training",
            [[record(ratio=1.0, off_by=0.011)]],
            ["4096 tokens: gradients differ from the resident model's by more than 1 %."],
        ),
        (
            "overhead",
            [
                [
                    call("linear_without_bias", 5.0),
                    call("multiply", 15.0),
                    call("fetch", 99.0),
                    call("multiply", 19.0, "grad"),
                ]
            ],
            [],
        ),
        (
            "overhead",
            [[call("linear_without_bias", 5.1)]],
            ["linear_without_bias costs the host 5.1 us more, and not 5.0."],
        ),
        ("overhead", [[call("multiply", 15.1)]], ["multiply costs the host 15.1 us more, and not 15.0."]),
        ("autocast", [[lowered("forward", 0.98), lowered("accumulation", None)]], []),
        ("autocast", [[lowered("forward", 0.979)]], ["forward, offload: 0.979 of the ideal, and not 0.98."]),
        (
            "autocast",
            [[lowered("accumulation", None, equal=False)]],
            ["accumulation of 2048 tokens, offload: other bits than the resident model's."],
        ),
        ("batches", [[streamed(False, 0.86), streamed(True, 0.95), streamed(True, 0.1, size=1 << 16)]], []),
        (
            "batches",
            [[streamed(False, 0.96), streamed(True, 0.955, equal=False)]],
            [
                "the sum of weights of 1024 KiB is wrong.",
                "weights of 1 MiB: 0.955 of the link's rate, and not 0.95, or 0.960 as without.",
            ],
        ),
        (
            "batches",
            [[streamed(False, 0.86), streamed(True, 0.949)]],
            ["weights of 1 MiB: 0.949 of the link's rate, and not 0.95, or 0.860 as without."],
        ),
        ("optimizer", [ALONE, TRAINED], []),
        (
            "optimizer",
            [[*ALONE, stepped("default", 0.1101)], TRAINED],
            ["AdamW on offload: 1.101 times PyTorch's fused step on the CPU, and not 1.1."],
        ),
        (
            "optimizer",
            [ALONE, [*TRAINED, *trained(0.821)]],
            ["training in torch.bfloat16, default: 0.821 of the step with waits, and not 0.82."],
        ),
        (
            "optimizer",
            [ALONE, [*TRAINED, *trained(0.781, "torch.float32", "fused")]],
            ["training in torch.float32, fused: 0.781 of the step with waits, and not 0.78."],
        ),
        ("placement", [FED], []),
        *(
            (
                "placement",
                [[fed(goal + 0.001, work, budget)]],
                [f"{work}, budget {budget}: {goal + 0.001:.3f} times fed with CUDA tensors, and not {goal}."],
            )
            for work, budget, goal in [
                *((work, "automatic", 1.1) for work in (FORWARD, BOTH, GENERATE)),
                (FORWARD, "half", 1.25),
            ]
        ),
        (
            "placement",
            [[fed(1.0, FORWARD, "0", "CUDA", equal=False)]],
            ["forward, 4096 tokens, budget 0, fed with CUDA: the output differs from the resident model's."],
        ),
        ("residency", [BUDGETS, STEPS], []),
        (
            "residency",
            [[*BUDGETS, run("half", 0.056)], STEPS],
            ["2048 tokens, half the weights: 0.560 of the time without, and not 0.55."],
        ),
        (
            "residency",
            [[*BUDGETS, run("auto", 0.021)], STEPS],
            ["2048 tokens, automatic: 1.050 times the resident, and not 1.02."],
        ),
        (
            "residency",
            [[*BUDGETS, run("auto", 0.0262, tokens=1)], STEPS],
            ["1 tokens, automatic: 1.310 times the resident, and not 1.3."],
        ),
        (
            "residency",
            [[*BUDGETS, run("auto, full GPU", 0.0424, ideal=0.04)], STEPS],
            ["2048 tokens, GPU filled: 1.060 times the ideal, and not 1.05."],
        ),
        (
            "residency",
            [[*BUDGETS, run("auto", 0.02, equal=False)], STEPS],
            ["2048 tokens, budget auto: the output differs from the resident model's."],
        ),
        (
            "residency",
            [BUDGETS, [run("", 1.03, variant="offload", ideal=1.0, **MOVED)]],
            ["micro-batches: 1.030 times the ideal, and not 1.02."],
        ),
        (
            "residency",
            [BUDGETS, [run("", 1.0, variant="offload", ideal=1.0, **MOVED | {"bytes_up": 4 * 2**32})]],
            ["micro-batches: 0.00 GiB down and 16.00 up, where gradients of 4.00 go home once."],
        ),
        (
            "residency",
            [BUDGETS, [run("", 1.0, variant="offload", ideal=1.0, **MOVED | {"bytes_down": 2**32})]],
            ["micro-batches: 4.00 GiB down and 4.00 up, where gradients of 4.00 go home once."],
        ),
    ],
)
def test_a_missed_goal_is_told(name, records, missed, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load(name, monkeypatch)
    assert benchmark.problems(*records, tiny=False) == missed


@pytest.mark.parametrize("differs", [False, True])
def test_the_exit_of_graphs_tells_of_other_bits(differs, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = load("graphs", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["graphs.py", "--tiny"])
    monkeypatch.setattr(graphs, "equal", lambda result, expected: result is expected or not differs)
    monkeypatch.setattr(graphs, "write_record", lambda *_: None)
    if not differs:
        graphs.main()
    else:
        with pytest.raises(SystemExit) as exited:
            graphs.main()
        assert exited.value.code.splitlines() == [
            f"{shape}, offload, {way}, {kept} kept on the GPU: the result differs from the resident model's."
            for shape in ("256 features", "1,024 features")
            for kept in ("nothing", "all weights")
            for way in (["called", "a graph"] if GPU else ["called"])
        ]


def test_a_full_benchmark_without_a_gpu_says_what_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "forward.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCH_OFFLOAD_LINK": "auto"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr
    assert "Traceback" not in done.stderr
