"""Users' own ``torch.autograd.Function``: beside activations, their offload operands are fetched first.

Their backward returns a gradient on the activations' device, which autograd refuses for an operand on another. Fetched
outside of the function, by a differentiable operation, an offload operand is what the author assumed: a tensor
beside the others. What the function writes to it comes home, in forward and, where its context keeps the tensor, in backward.
What the context keeps has memory while the function's backward runs, as what PyTorch's own operations save.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function

from torch_offload import _C
from torch_offload._wrappers import fetched, target_of


class _Lent:
    """An operand on offload and what was fetched of it, which share one counter of writes."""

    def __init__(self, source: Tensor, value: Tensor) -> None:
        self._source, self._value = source, weakref.ref(value)
        self._version = source._version

    def bring_home(self) -> None:
        value = self._value()
        if value is not None and self._source._version != self._version:
            _C.bring_home(value)
            self._version = self._source._version

    def is_kept(self) -> bool:
        return self._value() is not None

    def release(self, watch: _C.ReleaseRefill) -> None:
        value = self._value()
        if value is not None:
            watch.add(self._source, value)


def _lend(args: Iterable[Any], target: torch.device) -> tuple[tuple[Any, ...], list[_Lent]]:
    given = [fetched(value, target) for value in args]
    lent = [
        _Lent(source, value)
        for source, value in zip(args, given, strict=True)
        if value is not source and type(value) is Tensor and not source.is_inference()
    ]
    return tuple(given), lent


def _watch_backward(results: Any, lent: list[_Lent], watch: _C.ReleaseRefill) -> None:
    def bring_home(*gradients: Any) -> None:
        for operand in lent:
            operand.bring_home()

    results = results if isinstance(results, (tuple, list)) else [results]
    results = [result for result in results if isinstance(result, Tensor)]
    nodes = {result.grad_fn for result in results if result.grad_fn is not None}
    for node in nodes:
        node.register_hook(bring_home)  # before the memory is given up, which is the hook that comes next
    for operand in lent:
        operand.release(watch)
    watch.finish(results)


def call_fetched(function: Callable[..., Any], args: Iterable[Any], target: torch.device, **kwargs: Any) -> Any:
    """Calls a function with what is fetched of its offload operands. What it writes to them, or keeps, is seen to as above."""
    watch = _C.ReleaseRefill(target)
    args, lent = _lend(args, target)
    try:
        results = function(*args, **kwargs)
    finally:  # also where checkpointing has ended a recomputation early
        for operand in lent:
            operand.bring_home()
    del args
    lent = [operand for operand in lent if operand.is_kept()]
    if lent:
        _watch_backward(results, lent, watch)
    return results


def _is_left_alone(cls: type) -> bool:
    # Compiled graphs and functorch's levels fetch by themselves. Checkpointing keeps its arguments, and hands them on as
    # they are.
    module = cls.__module__
    if not issubclass(cls, function.Function) or module == "torch.utils.checkpoint":
        return True
    return module.startswith("torch._functorch._aot_autograd.")


def register() -> None:
    """Puts the fetch in front of every call of ``apply`` that functorch does not handle itself."""
    # Where PyTorch's own `apply` is written in Python, it handles functorch first and then asks its base.
    in_python = isinstance(function.Function.__dict__["apply"], classmethod)
    base = function._SingleLevelFunction if in_python else function.Function

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        target = None if _is_left_alone(cls) else target_of(args)
        if target is None:
            return super(base, cls).apply(*args, **kwargs)
        return call_fetched(super(base, cls).apply, args, target, **kwargs)

    base.apply = classmethod(apply)
