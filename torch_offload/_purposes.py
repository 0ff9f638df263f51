"""Tells the device which of its bytes are parameters, gradients and optimizer state, for ``torch.offload.memory_stats()``.

A module's parameters and buffers are claimed where the module gets them: when it is made, moved, copied or loaded. An
optimizer's state is claimed after the step that made it, or the first one after it was loaded. Gradients and results of
operations are known in C++ as they are made. Source of the purposes: Note [Whose bytes], csrc/core/purpose.h.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torch_offload import _C


def _claim_module(module: torch.nn.Module) -> None:
    _C.claim((vars(module).get("_parameters"), vars(module).get("_buffers")), "parameter")


def _after(name: str, claim: Callable[..., None]) -> None:
    original = getattr(torch.nn.Module, name)

    @functools.wraps(original)
    def method(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not torch.compiler.is_dynamo_compiling() and _C.in_use():  # it cannot trace a claim
            claim(self, *args, **kwargs)
        return result

    setattr(torch.nn.Module, name, method)


def _claim_all(module: torch.nn.Module, *_: Any, **__: Any) -> None:
    _claim_module(module)
    parameters = vars(module).get("_parameters") or {}  # a class's own __getstate__ may leave them out
    gradients = [p.grad for p in parameters.values() if p is not None and p.grad is not None]
    _C.claim(gradients, "gradient")


def _claim_one(module: torch.nn.Module, name: str, value: Any = None, *_: Any, **keywords: Any) -> None:
    _C.claim((value, keywords), "parameter")


def claim_state(optimizer: Optimizer) -> None:
    """Called after every step of an optimizer that holds offload parameters: what its state holds is the optimizer's."""
    _C.claim(optimizer.state, "optimizer")


def register() -> None:
    """Puts the claims behind the methods by which every module gets its tensors."""
    _after("_apply", _claim_all)
    _after("__setstate__", _claim_all)
    _after("register_parameter", _claim_one)
    _after("register_buffer", _claim_one)
