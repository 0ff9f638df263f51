"""Every benchmark runs in a small version, to its end, and writes its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ["arena", "batches", "exactness", "forward", "load", "memory", "optimizer", "overhead", "residency", "training"]


def test_every_benchmark_is_here() -> None:
    shared = {"blocks", "harness", "peers"}
    assert sorted({path.stem for path in BENCHMARKS.glob("*.py")} - shared) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_small_version_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--tiny"]
    environment = os.environ | {"OUT": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["machine"]["torch"]
    assert all(run.get("equal", True) for run in record.get("runs", []))


def test_a_full_benchmark_without_a_gpu_says_what_it_needs(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "forward.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCH_OFFLOAD_LINK": "auto"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stderr
    assert "Traceback" not in done.stderr
