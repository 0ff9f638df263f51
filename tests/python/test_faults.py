"""Every call to the device fails once, in every scenario: what fault_program.py checks, in processes of their own.

``TORCH_OFFLOAD_LINK=sim TORCH_OFFLOAD_FAULT=0 python tests/python/fault_program.py train`` repeats one by hand.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers import GPU, SIM, passes, python

HERE = Path(__file__).parent
LINK = {"TORCH_OFFLOAD_LINK": "auto" if GPU else "sim", "TORCH_OFFLOAD_FAULT": "0"}
pytestmark = [pytest.mark.skipif(SIM, reason="a run within a run"), pytest.mark.once]

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


# Where `n` and `lost` are known: a process with copies on their way, of which a call fails from now on.
IN_FLIGHT = """
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to("offload")
net(torch.ones(8, 64, device=device)).sum().backward()
product = net[0].weight @ net[1].weight
fetched = net[2].weight.detach().to(device)
_C.fail_call(n, lost)
print("done", flush=True)
"""

# Forks a process for each n until one ends without having reached the call. A line for each: n, exit status, failures, output.
SWEEP = """
import atexit, json, os, sys, tempfile
parent = os.getpid()
# What is registered before the import runs after what the import registers.
atexit.register(lambda: os.getpid() != parent and print(_C.failed_calls(), flush=True))
import torch, torch_offload
from torch_offload import _C

n, pid, failures = 0, None, None
while pid != 0 and failures != "0":
    n += 1
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            out.seek(0)
            err.seek(0)
            said, *rest = out.read().splitlines() or [""]
            failures = rest[-1] if rest else None
            print(json.dumps([n, status, said, failures, err.read()]), flush=True)
    if n == 200:
        break
if pid == 0:
"""


def check_exit(status: int, said: str, errors: str, lost: bool) -> None:
    """The process ends, with its own status; what it couldn't wait for is told once, and nothing crashes."""
    assert status == 0, errors
    assert said == "done"
    assert errors.count("Traceback") <= 1
    assert errors or not lost
    assert errors == "" or errors.splitlines()[-1].startswith("RuntimeError: offload: "), errors


@pytest.mark.parametrize("lost", [False, True])
def test_exit_with_copies_in_flight(lost):
    program = SWEEP + textwrap.indent(f"lost = {lost}\n{IN_FLIGHT}", "    ")
    settings = {"TORCH_OFFLOAD_LINK": "sim", "TORCH_OFFLOAD_FAULT": "0", "TORCH_OFFLOAD_COPY_DELAY_US": "1000"}
    out = passes(program, timeout=300, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **settings)
    *reached, last = (json.loads(line) for line in out.splitlines())
    for n, status, said, failures, errors in reached:
        assert failures is not None, f"call {n}: {status}, {errors}"
        check_exit(status, said, errors, lost)
    assert len(reached) > 5
    assert last[1:] == [0, "done", "0", ""]


@pytest.mark.gpu
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_exit_with_copies_to_a_gpu_in_flight(n, lost):
    program = f"import torch, torch_offload\nfrom torch_offload import _C\nn, lost = {n}, {lost}\n{IN_FLIGHT}"
    done = python(program, **LINK, TORCH_OFFLOAD_COPY_DELAY_US="1000")
    check_exit(done.returncode, done.stdout.strip(), done.stderr, lost)


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
