"""Other libraries that do the same work, where they are installed."""

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from blocks import copied_to
from harness import synchronize
from torch import nn

RAMTORCH = "ramtorch"


def ramtorch() -> ModuleType | None:
    """RamTorch (PyPI: ramtorch), or None, having said that it is left out."""
    try:
        module = importlib.import_module(RAMTORCH)
        print(f"peer: RamTorch {importlib.metadata.version(RAMTORCH)}")
    except ImportError as error:
        print(f"peer: RamTorch is left out ({error}); 'pip install --no-deps ramtorch' brings it in")
        return None
    return module


@functools.cache
def save_activations_by_torchtune() -> type | None:
    """torchtune's (PyPI: torchtune) context that offloads what autograd saves, or None, having said that it is left out.

    Of its packages' own modules, which need all that torchtune needs to read data sets, none is run.
    """
    found = importlib.util.find_spec("torchtune")
    try:
        if found is None:
            raise ImportError("No module named 'torchtune'")
        if not torch.cuda.is_available():
            raise ImportError("it needs a CUDA device")
        for name, folder in {"torchtune": ".", "torchtune.training": "training"}.items():
            package = ModuleType(name)
            package.__path__ = [str(Path(root, folder)) for root in found.submodule_search_locations]
            sys.modules.setdefault(name, package)
        module = importlib.import_module("torchtune.training._activation_offloading")
        print(f"peer: torchtune {importlib.metadata.version('torchtune')}")
    except ImportError as error:
        brings = "'pip install --no-deps torchtune==0.6.1 torchao==0.14.1 psutil' brings it in"
        print(f"peer: torchtune is left out ({error}); {brings}")
        return None
    return module.OffloadActivations


def stream_blocks(
    blocks: nn.Sequential, device: torch.device, keep_activations: bool = False, offload_activations: bool = False
) -> nn.Module | None:
    """RamTorch's streamed model over copies of these blocks in host memory, a block a chunk, three chunks on the GPU at a time.

    Returns:
        An `OffloadModel`, to be closed after use; None where RamTorch isn't installed.
    """
    module = ramtorch()
    if module is None:
        return None
    return module.OffloadModel(
        list(copied_to(blocks, "cpu")),
        device=device,
        window=3,
        keep_activations=keep_activations,
        offload_activations=offload_activations,
    )


def make_variants(
    resident: nn.Sequential, device: torch.device, keep_activations: bool = False
) -> dict[str, nn.Module]:
    """The same blocks with their weights on the GPU, on offload, and by the peer if it is installed; see close_variants()."""
    models: dict[str, nn.Module] = {"resident": resident, "offload": copied_to(resident, "offload")}
    peer = stream_blocks(resident, device, keep_activations)
    if peer is not None:
        models["RamTorch"] = peer
    return models


def close_variants(models: dict[str, nn.Module]) -> None:
    """Waits for all work, and ends the peer's."""
    synchronize()
    if "RamTorch" in models:
        models["RamTorch"].close()
