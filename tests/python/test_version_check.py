"""What the package says under a torch that it can't work with."""

import re
from pathlib import Path

import pytest
import torch

from torch_offload import _version_check
from torch_offload._version_check import NEWEST, OLDEST, load_extension, unsupported

HEADER = Path(__file__).parents[2] / "csrc" / "compat" / "torch_version.h"


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.12.1", "2.15.0a0+git1234567", "2.15.3"])
def test_supported(version: str) -> None:
    assert unsupported(version) == ""


@pytest.mark.parametrize("version", ["2.10.1", "2.1.0", "1.13.1", "2.16.0.dev20260101", "3.0.0", "unknown"])
def test_unsupported_names_the_version_the_range_and_the_remedy(version: str) -> None:
    problem = unsupported(version)
    assert f"supports torch 2.11 to 2.15 and found torch {version};" in problem
    assert "pip install 'torch>=2.11,<2.16'" in problem


def test_the_torch_of_this_process_is_supported() -> None:
    assert load_extension().unsupported_torch(torch.__version__) == ""


def test_an_extension_built_for_another_torch_is_refused() -> None:
    problem = load_extension().unsupported_torch("2.99.0")
    assert "found torch 2.99.0" in problem
    assert "build torch_offload again" in problem


def test_an_unsupported_torch_is_refused_before_the_extension_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    monkeypatch.setattr(_version_check.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(ImportError, match=r"found torch 2\.10\.0"):
        load_extension()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ImportError("undefined symbol: _ZN3c10"), "built for another torch.*undefined symbol: _ZN3c10"),
        (ModuleNotFoundError("No module named 'torch_offload._C'", name="torch_offload._C"), "is not built"),
    ],
)
def test_an_extension_that_does_not_load_is_explained(monkeypatch, error: ImportError, text: str) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(_version_check.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=text):
        load_extension()


def test_python_and_cpp_agree_on_the_range() -> None:
    constants = dict(re.findall(r"constexpr int (kTorchMajor|k\w+TorchMinor) = (\d+);", HEADER.read_text()))
    major, oldest, newest = (int(constants[name]) for name in ("kTorchMajor", "kOldestTorchMinor", "kNewestTorchMinor"))
    assert ((major, oldest), (major, newest)) == (OLDEST, NEWEST)
