"""A program that does not say "offload" is unchanged by ``import torch_offload``.

Each file under ``guest/cpu`` and ``guest/gpu`` is such a program. It runs twice, without and with the import, in processes of
their own. What it prints stands for values bit by bit (``guest/bits.py``), so equal text means equal behaviour; warnings count.
To add a case, add a program: it prints the same at each run, and nothing that depends on time or addresses.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest

GUEST = Path(__file__).parent / "guest"
PROGRAMS = [
    pytest.param(path, id=f"{folder}-{path.stem}", marks=marks)
    for folder, marks in (("cpu", ()), ("gpu", (pytest.mark.gpu,)))
    for path in sorted((GUEST / folder).glob("*.py"))
]


class Result(NamedTuple):
    returncode: int
    stdout: list[str]
    warnings: list[str]


def python(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in ``folder``, with compilation caches of its own and deterministic cuBLAS."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(GUEST), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def warnings_in(stderr: str, folder: Path) -> list[str]:
    """The lines that warn, without what differs from run to run: folder, process id, and the time before a C++ warning.

    The profiler's library looks for CUPTI once any PrivateUse1 backend has a name, and logs it where there is no driver.
    """
    lines = [
        line for line in stderr.splitlines() if "Warning" in line or ("WARNING" in line and "cupti" not in line.lower())
    ]
    return sorted(re.sub(r"pid=\d+|\[W[\d :.]+|WARNING:[\d :-]+", "", line).replace(str(folder), "") for line in lines)


def run(program: Path, folder: Path, first_statement: str = "") -> Result:
    folder.mkdir()
    # On the first line, so that every line keeps its number in messages.
    (folder / "program.py").write_text(first_statement + program.read_text())
    done = python(["program.py"], folder)
    sys.stderr.write(done.stderr)
    return Result(done.returncode, done.stdout.splitlines(), warnings_in(done.stderr, folder))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_import_changes_nothing(program: Path, tmp_path: Path) -> None:
    alone = run(program, tmp_path / "alone")
    assert alone.returncode == 0, "the program fails here by itself"
    assert alone.stdout
    assert run(program, tmp_path / "beside", "import torch_offload; ") == alone


@pytest.mark.parametrize("statement", ["import torch_offload", "import torch, torch_offload"])
def test_the_import_warns_of_nothing_and_prints_nothing(statement: str, tmp_path: Path) -> None:
    done = python(["-W", "error", "-c", statement], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_torch_does_not_import_the_package_by_itself() -> None:
    assert not [point for point in entry_points(group="torch.backends") if "offload" in point.value]
