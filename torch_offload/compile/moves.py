"""Compiled code of a module that is moved to offload or away from it.

``Module.to`` keeps the parameter, and gives it other memory. PyTorch 2.11 doesn't look at where a module's parameter is for as
long as the dict that holds it has not changed. Code that was compiled for the CPU would read an offload tensor's host bytes,
which may be old, and code with fetches would be given a tensor of the CPU. So the dict changes, and Dynamo looks again.
"""

import sys

import torch

from torch_offload import _C
from torch_offload._wrappers import is_offload


def on_offload(module: torch.nn.Module) -> frozenset[int]:
    """The ids of the module's tensors on offload, for `look_again`; none for a program that compiles nothing, or has none."""
    if "torch._dynamo" not in sys.modules or not _C.in_use():
        return frozenset()
    return frozenset(
        id(tensor)
        for part in module.modules()
        for entries in (part._parameters, part._buffers)
        for tensor in entries.values()
        if is_offload(tensor)
    )


def look_again(module: torch.nn.Module, before: frozenset[int]) -> None:
    """Has Dynamo look at the tensors that were moved since. A tensor that another took the place of has changed its dict."""
    if "torch._dynamo" not in sys.modules or not _C.in_use():
        return
    for part in module.modules():
        for entries in (part._parameters, part._buffers):
            name = next(
                (name for name, tensor in entries.items() if is_offload(tensor) != (id(tensor) in before)), None
            )
            if name is not None and isinstance(entries, dict):  # and not what TorchScript has in the place of one
                tensor = entries[name]
                try:
                    entries[name] = None
                finally:
                    entries[name] = tensor
