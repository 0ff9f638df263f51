"""Other libraries that do the same work, where they are installed."""

import importlib
import importlib.metadata
from types import ModuleType

import torch
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


def stream_blocks(blocks: nn.Sequential, device: torch.device, keep_activations: bool = False) -> nn.Module | None:
    """RamTorch's streamed model over copies of these blocks in host memory, a block a chunk, three chunks on the GPU at a time.

    Returns:
        An `OffloadModel`, to be closed after use; None where RamTorch isn't installed.
    """
    from blocks import copied_to

    module = ramtorch()
    if module is None:
        return None
    return module.OffloadModel(
        list(copied_to(blocks, "cpu")), device=device, window=3, keep_activations=keep_activations
    )
