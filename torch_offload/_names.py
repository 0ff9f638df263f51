"""Names of tensors, for profilers: the cache's ranges carry them (csrc/aten/activity_ranges.h)."""

import gc
import itertools
from collections.abc import Iterator
from urllib.parse import quote

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_offload import _C
from torch_offload._wrappers import is_offload

_PLAIN = "".join(chr(code) for code in range(32, 127) if chr(code) not in '"\\%')


def _escaped(name: str) -> str:
    """A name as profilers can write it, ``urllib.parse.unquote``'s inverse: these take printable ASCII without quotes."""
    return quote(name, safe=_PLAIN)


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors inside of a wrapper, which has no memory of its own; of any other tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


def name_tensors(module: torch.nn.Module, prefix: str = "", replace: bool = True) -> None:
    """Names the offload parameters and buffers of a module; ``replace`` says what becomes of names that they have."""
    for name, tensor in itertools.chain(module.named_parameters(prefix), module.named_buffers(prefix)):
        if not is_offload(tensor):
            continue
        for part_name, part in _parts(name, tensor):
            _C.name_tensor(part, _escaped(part_name), replace)


def _is_made(module: torch.nn.Module) -> bool:
    """Another thread may be about to, or an exception has ended it."""
    return all(name in vars(module) for name in ("_modules", "_parameters", "_buffers"))


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


def name_all_modules() -> None:
    """The same for every module that is no part of another one; with their class in front where there are several."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module) and _is_made(thing)]
    parts = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in parts and any(map(is_offload, _tensors(module)))]
    for module in roots:
        name_tensors(module, type(module).__name__ if len(roots) > 1 else "")
