"""Every call to the device fails once, in every scenario: what fault_program.py checks, in processes of their own.

``TORCH_OFFLOAD_LINK=sim TORCH_OFFLOAD_FAULT=0 python tests/python/fault_program.py train`` repeats one by hand.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import GPU, SIM, python

HERE = Path(__file__).parent
LINK = {"TORCH_OFFLOAD_LINK": "auto" if GPU else "sim", "TORCH_OFFLOAD_FAULT": "0"}
pytestmark = pytest.mark.skipif(SIM, reason="a run within a run")

RUNS = {
    "a budget": (["train", "retained", "results", "save", "load", "step", "forward", "accumulate", "move"], {}),
    "no budget": (
        ["train", "results", "step", "load"],
        {"TORCH_OFFLOAD_BUDGET": "0", "TORCH_OFFLOAD_EVICT": "1", "TORCH_OFFLOAD_SEED": "3"},
    ),
    "pageable memory and a small budget": (
        ["accumulate", "step", "forward", "save", "move"],
        {
            "TORCH_OFFLOAD_PINNED_LIMIT": "0",
            "TORCH_OFFLOAD_BUDGET": "2048",
            "TORCH_OFFLOAD_RING_BYTES": "512",
            "TORCH_OFFLOAD_POISON": "1",
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_each_call_fails_once(name):
    scenarios, settings = RUNS[name]
    done = subprocess.run(
        [sys.executable, str(HERE / "fault_program.py"), *scenarios],
        env={
            **os.environ,
            **LINK,
            "TORCH_OFFLOAD_VALIDATE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "OMP_NUM_THREADS": "1",
            **settings,
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{settings}\n{done.stdout}\n{done.stderr[-4000:]}"
    assert done.stdout.count("\n") == len(scenarios)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_exit_with_copies_in_flight(n, lost):
    """The process ends, with its own status; what it couldn't wait for is told once, and nothing crashes."""
    done = python(
        f"""
        import torch, torch_offload
        from torch_offload import _C
        device = "cuda" if torch.cuda.is_available() else "cpu"
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to("offload")
        net(torch.ones(8, 64, device=device)).sum().backward()
        product = net[0].weight @ net[1].weight
        fetched = net[2].weight.detach().to(device)
        _C.fail_call({n}, {lost})
        print("done")
        """,
        **LINK,
        TORCH_OFFLOAD_COPY_DELAY_US="1000",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert done.stderr.count("Traceback") <= 1
    assert done.stderr or not lost
    assert done.stderr == "" or done.stderr.splitlines()[-1].startswith("RuntimeError: offload: "), done.stderr


def test_a_call_is_chosen_by_the_environment():
    done = python(
        """
        import torch, torch_offload
        for _ in range(2):
            try:
                print(torch.ones(3, device="offload").to("cuda" if torch.cuda.is_available() else "cpu").sum().item())
                print((torch.ones(3, 3, device="offload") @ torch.ones(3, 3, device="offload")).sum().item())
            except RuntimeError as error:
                print(error)
        print(torch_offload._C.failed_calls())
        """,
        **{**LINK, "TORCH_OFFLOAD_FAULT": "4"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("offload: the device was made to") for line in lines) == 1, lines
    assert lines[-2:] == ["27.0", "1"]


def test_without_the_setting_no_call_can_be_chosen():
    done = python(
        """
        import torch_offload
        try:
            torch_offload._C.fail_call(1)
        except RuntimeError as error:
            print(error)
        """,
        **{**LINK, "TORCH_OFFLOAD_FAULT": ""},
    )
    assert "set TORCH_OFFLOAD_FAULT=0" in done.stdout, done.stderr
