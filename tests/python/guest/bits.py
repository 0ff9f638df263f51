"""Prints values so that equal text means equal bits. The programs of this folder use it."""

import hashlib
import os
import warnings
from collections.abc import Callable

import torch


def bits(*tensors: torch.Tensor) -> str:
    """A digest of the tensors' shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        host = tensor.detach().cpu().contiguous()
        digest.update(f"{tuple(host.shape)} {host.dtype}".encode())
        digest.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def state_bits(model: torch.nn.Module) -> str:
    """A digest of the model's state and gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return bits(*model.state_dict().values(), *gradients)


def outcome(action: Callable[[], object]) -> str:
    """What the call returns, or the type and text of what it raises, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            text = str(action())
        except Exception as error:
            # What follows the first line is where it was raised, in C++ frames.
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    said = " | ".join([text, *(str(warning.message) for warning in caught)])
    return said.replace(f"pid={os.getpid()}", "pid")
