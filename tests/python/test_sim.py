"""The suite again on the simulated link: CPU tensors play CUDA's part, copies land late and in any legal order.

Each run is a process of its own. A seed picks the schedule; a failing one is a bug report: repeat it with
``TORCH_OFFLOAD_LINK=sim TORCH_OFFLOAD_SEED=... pytest tests/python/...``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import GPU, SIM
from sim_runs import EACH_TORCH, EXTRA, GPU_RUNS, LATER, RUNS

HERE = Path(__file__).parent
OLDEST = "2.11."  # that is supported
pytestmark = pytest.mark.skipif(SIM, reason="a run within a run")


def run_suite(files: list[str], settings: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
    options = ["-c", str(HERE.parent.parent / "pyproject.toml"), "-m", "not whole_gpu"]
    done = subprocess.run(
        [*command, *options, *[f if f.startswith("-") else str(HERE / f) for f in files]],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, f"{settings}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def marks(name: str) -> list[pytest.MarkDecorator]:
    oldest = torch.__version__.startswith(OLDEST)
    extra = name in EXTRA or (name in LATER and not oldest)
    once = name not in EACH_TORCH | LATER
    return [mark for mark, given in ((pytest.mark.extra, extra), (pytest.mark.once, once)) if given]


@pytest.mark.skipif(GPU, reason="runs from a process without a GPU")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in RUNS])
def test_on_the_simulated_link(name):
    files, settings = RUNS[name]
    run_suite(files, {"TORCH_OFFLOAD_LINK": "sim", **settings})


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_RUNS)
def test_on_the_gpu_with_late_copies(name):
    run_suite(*GPU_RUNS[name])
