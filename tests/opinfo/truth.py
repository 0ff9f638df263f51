"""What else may be right on a GPU: the host draws and writes there too, and not every kernel gives the same twice."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from helpers import CPU
from torch.utils._python_dispatch import TorchDispatchMode

REPEATS = 8


class Draws(TorchDispatchMode):
    """Sees whether anything within it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class HostDraws(TorchDispatchMode):
    """Factories and writes draw their random numbers on the host, as on offload; all else stays where it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        first = func._schema.arguments[0]
        if first.alias_info is not None and first.alias_info.is_write:
            return args[0].copy_(func(args[0].to(CPU), *args[1:], **kwargs))
        if func.__name__.split(".")[0].endswith("_like"):
            device = kwargs.get("device") or args[0].device
            return func(args[0].to(CPU), *args[1:], **{**kwargs, "device": CPU}).to(device)
        if kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": CPU}).to(kwargs["device"])
        return func(*args, **kwargs)


def varies(again: Callable[[], Any], same: Callable[[Any], bool]) -> bool:
    """Whether the plain device gives something else when it is asked again and again."""
    return any(not same(again()) for _ in range(REPEATS))


def may_vary(run: Callable[[], Any]) -> bool:
    """Whether PyTorch says that a kernel of the run is not deterministic: it may give the same for as often as one asks."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            run()
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return any("does not have a deterministic implementation" in str(warning.message) for warning in said)
