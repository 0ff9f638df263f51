"""Loads the extension, or says in one sentence why it can't be loaded under this torch.

The extension is bound to the C++ ABI of one minor version of PyTorch. Under another one it fails with undefined symbols, or
loads and goes wrong later; so the version is looked at before, and what it was built for after.
"""

import importlib
import re
from types import ModuleType

import torch

OLDEST = (2, 11)
NEWEST = (2, 15)


def unsupported(version: str) -> str:
    """Why ``version`` ("2.11.0+cu130") is no torch for this package, as one sentence; "" if it is one."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return ""
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    return (
        f"torch_offload supports torch {oldest} to {newest} and found torch {version}; "
        f"install one of those (pip install 'torch>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'), "
        "or a torch_offload that supports this one."
    )


def load_extension() -> ModuleType:
    """Imports ``torch_offload._C``.

    Raises:
        ImportError: torch is out of the supported range, or the extension is missing or was built for another torch.
    """
    if problem := unsupported(torch.__version__):
        raise ImportError(problem)
    try:
        extension = importlib.import_module("torch_offload._C")
    except ModuleNotFoundError as error:
        if error.name != "torch_offload._C":
            raise
        raise ImportError(
            "torch_offload's extension _C is not built for this Python; build it with "
            "'pip install --no-build-isolation .' in its source tree, under the torch that it shall run with."
        ) from error
    except ImportError as error:
        raise ImportError(
            f"torch_offload's extension does not load under torch {torch.__version__}, most likely because it was built "
            f"for another torch; build it again under this one, with --no-build-isolation (the loader says: {error})."
        ) from error
    if problem := extension.unsupported_torch(torch.__version__):
        raise ImportError(problem)
    return extension
