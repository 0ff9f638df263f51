"""Scopes that say where operations on offload tensors run, and how a scope decorates functions."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils._contextlib import context_decorator

from torch_offload import _C

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Scope = TypeVar("_Scope", bound="Decorator")


class Decorator:
    """A scope that decorates functions as ``torch.no_grad()`` does: a generator is within it while it runs, and not while it is
    suspended. It must be one that several threads may enter, and enter again."""

    def __call__(self, function: _Function) -> _Function:
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            name = getattr(function, "__qualname__", function)
            raise TypeError(
                f"offload: {type(self).__name__} can't decorate {name}, which is async: other tasks would run in the scope "
                "while it waits; write `with` inside of it, around what awaits nothing."
            )
        return context_decorator(self._itself, function)

    def _itself(self: _Scope) -> _Scope:
        return self


class _Bare(type(_C.HostScope)):
    """The type of a scope that decorates without parentheses, too."""

    def __call__(cls, function: Callable[..., Any] | None = None) -> Any:
        scope = super().__call__()
        return scope if function is None else scope(function)


# Entering and leaving are calls of C, between which and the `with` no KeyboardInterrupt comes: what was opened is closed.
class on_host(_C.HostScope, Decorator, metaclass=_Bare):  # noqa: N801 - named as torch.no_grad is
    """Within it, operations of this thread on offload tensors alone run on the CPU, in place on the host bytes.

    Without it a new value (``w.norm()``, ``a @ b``) is made on the GPU that ``offload:i`` is paired with. Operations that also
    take CUDA tensors are not affected. ``Optimizer.step()`` runs within such a scope by itself. May be nested and used as a
    decorator, with parentheses or without; a generator is within it while it runs, and async functions are refused.

    Source: the placement rule, docs/design/placement.md.
    """
