"""Optimizer steps on the host: the scope around every step, and the CPU's choice of algorithm."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import Optimizer

from torch_offload import _C, _optimizer_steps
from torch_offload._purposes import claim_state
from torch_offload._scopes import on_host
from torch_offload._wrappers import is_offload


def _holds_offload(optimizer: Optimizer) -> bool:
    return any(is_offload(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _outside(closure: Callable[..., Any]) -> Callable[..., Any]:
    """A step's closure computes what a training loop computes, and where that does."""

    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _C.HostScopeBreak():
            return closure(*args, **kwargs)

    return call


def _place_of_closure(step: Callable[..., Any]) -> int | None:
    """Which argument the closure is, if it is given by its place; of a step that is compiled Python can't always tell."""
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("closure") - 1 if "closure" in names else None


# Hooks of a step would not do: the one behind it is not called where the step raises.
def _hosted(step: Callable[..., Any]) -> Callable[..., Any]:
    place = _place_of_closure(step)

    @functools.wraps(step)
    def step_on_host(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # A compiled step is part of its graph, which computes on the device.
        if torch.compiler.is_dynamo_compiling() or not _C.in_use() or not _holds_offload(self):
            return step(self, *args, **kwargs)
        _optimizer_steps.install()
        if place is not None and len(args) > place and callable(args[place]):
            args = (*args[:place], _outside(args[place]), *args[place + 1 :])
        if callable(kwargs.get("closure")):
            kwargs["closure"] = _outside(kwargs["closure"])
        with on_host():
            result = step(self, *args, **kwargs)
        claim_state(self)
        return result

    return step_on_host


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _default_to_the_cpus_algorithm() -> None:
    # PyTorch takes every PrivateUse1 device for one on which list operations pay. On the host they don't: the temporaries of
    # such a step are as large as the model.
    supported = optimizer_module._get_foreach_kernels_supported_devices
    optimizer_module._get_foreach_kernels_supported_devices = lambda: [
        name for name in supported() if name != "offload"
    ]


def register() -> None:
    """Puts the scope around the steps of every optimizer that holds offload parameters.

    PyTorch wraps the ``step`` of a class when its first optimizer is made; that is where this wraps it too.
    """
    _default_to_the_cpus_algorithm()
    hook = Optimizer.profile_hook_step
    Optimizer.profile_hook_step = staticmethod(lambda step: _hosted(hook(step)))
    for cls in {*_subclasses(Optimizer)}:
        step = cls.__dict__.get("step")
        if getattr(step, "hooked", False):
            cls.step = _hosted(step)
