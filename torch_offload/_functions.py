"""Users' own ``torch.autograd.Function``: beside activations, their offload operands are fetched first.

Their backward returns a gradient on the activations' device, which autograd refuses for an operand on another. Fetched
outside of the function, by a differentiable operation, an offload operand is what the author assumed: a tensor
beside the others. What the function writes to it comes home, in forward and, where its context keeps the tensor, in backward.
What the context keeps has memory while the function's backward runs, as what PyTorch's own operations save.

The function may know the operand by another way, too, as a module's parameter. So what it returns of what it was lent is the
operand, where it was written to; gradients that it asks for with respect to what it was lent are the operand's; and what it
returns as an operand's gradient may be wherever it computed that.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function, graph

from torch_offload import _C
from torch_offload._wrappers import fetched, is_offload, target_of

_LENT = "offload.lent"  # in the metadata of a fetch's node: what it gives was lent
_DEVICES = "_offload_devices"  # of a function's context: where autograd wants the gradient of each argument


class _Lent:
    """An operand on offload and what was fetched of it, which share one counter of writes."""

    def __init__(self, source: Tensor, value: Tensor) -> None:
        self._source, self._value = source, weakref.ref(value)
        self._version = None if source.is_inference() else source._version  # of those nobody counts writes
        if source.__dict__:
            value.__dict__.update(source.__dict__)  # what somebody has put on it: Megatron's main_grad
        if value.grad_fn is not None:
            value.grad_fn.metadata[_LENT] = True
        _C.before_change(value)

    def _is_written(self) -> bool:
        return self._version is None or self._source._version != self._version

    def bring_home(self) -> None:
        value = self._value()
        if value is not None and self._is_written():
            _C.bring_home(value)
            if self._version is not None:
                self._version = self._source._version

    def bring_gradient(self) -> None:
        """What a backward has added up by itself, in ``.grad``."""
        value = self._value()
        gradient = None if value is None else _C.take_gradient(value)
        if gradient is None:
            return
        with torch.no_grad():
            if self._source.grad is not None:
                self._source.grad.add_(gradient)
            else:
                self._source.grad = _moved(gradient, self._source.device)

    def result_for(self, result: Any) -> Any:
        """The operand, where the function has written to what it was lent of it and returns that."""
        if result is not self._value():
            return result
        if result.grad_fn is not None and _LENT not in result.grad_fn.metadata:
            # It is marked as dirty, and its history is now the operand's.
            self.bring_home()
            if not _C.rebase(self._source, result):
                with torch.autograd._unsafe_preserve_version_counter(self._source):  # the write has been counted
                    self._source.copy_(result)
            return self._source
        return self._source if self._is_written() else result

    def is_kept(self) -> bool:
        return self._value() is not None

    def release(self, watch: _C.ReleaseRefill) -> None:
        value = self._value()
        if value is not None:
            watch.add(self._source, value)


def _lend(args: Sequence[Any], target: torch.device) -> tuple[tuple[Any, ...], list[_Lent]]:
    given = [fetched(value, target) for value in args]
    lent = [
        _Lent(source, value)
        for source, value in zip(args, given, strict=True)
        if value is not source and type(value) is Tensor
    ]
    return tuple(given), lent


def _tensors(results: Any) -> list[Tensor]:
    results = results if isinstance(results, (tuple, list)) else [results]
    return [result for result in results if isinstance(result, Tensor)]


def _watch_backward(results: list[Tensor], lent: list[_Lent], watch: _C.ReleaseRefill) -> None:
    def bring_home(*gradients: Any) -> None:
        for operand in lent:
            operand.bring_home()
            operand.bring_gradient()

    nodes = {result.grad_fn for result in results if result.grad_fn is not None}
    for node in nodes:
        node.register_hook(bring_home)  # before the memory is given up, which is the hook that comes next
    for operand in lent:
        operand.release(watch)
    watch.finish(results)


def _results_for(results: Any, lent: list[_Lent]) -> Any:
    def found(result: Any) -> Any:
        for operand in lent:
            result = operand.result_for(result)
        return result

    return tuple(map(found, results)) if type(results) is tuple else found(results)


def call_fetched(function: Callable[..., Any], args: Iterable[Any], target: torch.device, **kwargs: Any) -> Any:
    """Calls a function with what is fetched of its offload operands. What it writes to them, or keeps, is seen to as above."""
    watch = _C.ReleaseRefill(target)
    args = tuple(args)
    devices = _devices(args, target)
    args, lent = _lend(args, target)
    try:
        results = function(*args, **kwargs)
        made = _tensors(results)
        _expect(made, devices)
        results = _results_for(results, lent)
    finally:  # also where checkpointing has ended a recomputation early
        for operand in lent:
            operand.bring_home()
    del args
    lent = [operand for operand in lent if operand.is_kept()]
    if lent:
        _watch_backward(made, lent, watch)
    return results


def _devices(args: Sequence[Any], target: torch.device | None) -> tuple[torch.device | None, ...]:
    """Where the gradient of each argument has to be."""
    return tuple(
        None if not isinstance(value, Tensor) else target if target is not None and is_offload(value) else value.device
        for value in args
    )


def _expect(results: list[Tensor], devices: tuple[torch.device | None, ...]) -> None:
    for result in results:
        if isinstance(result.grad_fn, function.BackwardCFunction):
            setattr(result.grad_fn, _DEVICES, devices)
            return


def _moved(gradient: Any, device: torch.device | None) -> Any:
    if not isinstance(gradient, Tensor) or device is None or is_offload(gradient) == (device.type == "offload"):
        return gradient
    if is_offload(gradient):
        return torch.ops.offload.fetch(gradient, device)
    return torch.ops.offload.stash(gradient, device)


def _is_left_alone(cls: type) -> bool:
    # Compiled graphs and functorch's levels fetch by themselves. Checkpointing keeps its arguments, and hands them on as
    # they are; so does what calls a module's hooks, to the module.
    module = cls.__module__
    if not issubclass(cls, function.Function) or module in ("torch.utils.checkpoint", "torch.nn.modules._functions"):
        return True
    return module.startswith("torch._functorch._aot_autograd.")


def _is_lent(value: Any) -> bool:
    node = value.grad_fn if isinstance(value, Tensor) else None
    return node is not None and node.name().endswith("FetchBackward") and _LENT in node.metadata


def _gradients(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of what was lent, all that there is of its source: uses of either."""
    outputs, gradients, retain_graph, create_graph, inputs, allow_unused = args
    lent = [number for number, value in enumerate(inputs) if _is_lent(value)]
    sources = tuple(graph.GradientEdge(*inputs[number].grad_fn.next_functions[0]) for number in lent)
    found = list(run(outputs, gradients, retain_graph, create_graph, (*inputs, *sources), True, **kwargs))
    for number, gradient in zip(lent, found[len(inputs) :], strict=True):
        if gradient is not None:  # which has come by way of the fetch, too
            found[number] = _moved(gradient, _C.paired_device(gradient.device.index))
    found = found[: len(inputs)]
    if not allow_unused and any(gradient is None for gradient in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
            "the desired behavior."
        )
    return tuple(found)


def register() -> None:
    """Puts the fetch in front of every call of ``apply`` that functorch does not handle itself."""
    # Where PyTorch's own `apply` is written in Python, it handles functorch first and then asks its base.
    in_python = isinstance(function.Function.__dict__["apply"], classmethod)
    base = function._SingleLevelFunction if in_python else function.Function

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not any(map(is_offload, args)) or _is_left_alone(cls):
            return super(base, cls).apply(*args, **kwargs)
        _watch_gradients()
        target = target_of(args)
        if target is not None:
            return call_fetched(super(base, cls).apply, args, target, **kwargs)
        results = super(base, cls).apply(*args, **kwargs)
        _expect(_tensors(results), _devices(args, None))
        return results

    base.apply = classmethod(apply)


def _watch_gradients() -> None:
    """For what functions with offload operands return from backward, and ask autograd for. From the first of these on."""
    backward = function.BackwardCFunction.apply
    if getattr(backward, _DEVICES, False):
        return

    def apply(self: Any, *args: Any) -> Any:
        returned = backward(self, *args)
        devices = getattr(self, _DEVICES, None)
        if devices is None:
            return returned
        if not isinstance(returned, tuple):
            return _moved(returned, devices[0])
        return tuple(map(_moved, returned, devices)) if len(returned) == len(devices) else returned

    setattr(apply, _DEVICES, True)
    function.BackwardCFunction.apply = apply
    run = graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # As torch.autograd.grad() calls it.
        if len(args) == 6 and kwargs.get("accumulate_grad") is False and any(map(_is_lent, args[4])):
            return _gradients(run, args, kwargs)
        return run(*args, **kwargs)

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
