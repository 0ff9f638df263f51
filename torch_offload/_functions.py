"""Users' own ``torch.autograd.Function``: beside activations, their offload operands are fetched first.

Their backward returns a gradient on the activations' device, which autograd refuses for an operand on another. Fetched
outside of the function, by a differentiable operation, an offload operand is what the author assumed: a tensor
beside the others. What the function writes to it comes home, in forward and, where its context keeps the tensor, in backward.
What the context keeps has memory while the function's backward runs, as what PyTorch's own operations save. Operands that are
views of one storage are lent as views of one memory.

The function may know the operand by another way, too, as a module's parameter. So what it returns of what it was lent is the
operand, where it was written to, and otherwise a copy; gradients that it asks for with respect to what it was lent are the
operand's; and what it returns as an operand's gradient may be wherever it computed that.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad, function, graph
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from torch_offload import _C
from torch_offload._wrappers import fetched, is_offload, target_of

_LENT = "offload.lent"  # in the metadata of a fetch's node, where what it gives was lent: its source, and the fetch's target
_DEVICES = "_offload_devices"  # of a function's context: where autograd wants the gradient of each argument


def _reference(source: Tensor, value: Tensor) -> Callable[[], Tensor | None]:
    """What finds the operand again, without its history.

    A parameter by the node that adds up its gradients, which the graph holds anyway: `torch.utils.swap_tensors` refuses tensors
    that somebody has a weak reference to.
    """
    if source.is_leaf and source.requires_grad and value.grad_fn is not None:
        node, _ = value.grad_fn.next_functions[0]
        if node is not None and getattr(node, "variable", None) is source:
            return lambda: node.variable
    return weakref.ref(source)


class _Lent:
    """An operand on offload and what was fetched of it.

    A context may hold this for long: it keeps the operand's bytes, but neither what was fetched nor the operand's history, of
    which the context may be a part.
    """

    def __init__(self, source: Tensor, value: Tensor, target: torch.device) -> None:
        self._source, self._value = _reference(source, value), weakref.ref(value)
        # They share a counter of writes; what was made in inference mode has none, and what is fetched of it one of its own.
        self._bytes = None if source.is_inference() else source.detach()
        self._version = self._writes()
        value.__dict__ = source.__dict__  # with what somebody puts on it: Megatron's main_grad
        if value.grad_fn is not None:
            value.grad_fn.metadata[_LENT] = self._source, target
        _C.before_change(value)

    def _writes(self) -> int | None:
        counted = self._value() if self._bytes is None else self._bytes
        return None if counted is None else counted._version

    def bring_home(self) -> None:
        value, writes = self._value(), self._writes()
        if value is not None and writes != self._version:
            source = self._source()
            if value.layout is torch.sparse_coo and source is not None and not _C.is_fetched(value._values()):
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(source):
                    source.copy_(value)  # the function has put other values in the place of those that were fetched
            else:
                _C.bring_home(value)
            self._version = writes

    def bring_gradient(self) -> None:
        """What a backward has added up by itself, in ``.grad``; not what autograd has been asked to keep there."""
        value, source = self._value(), self._source()
        gradient = None if value is None or value.retains_grad else _C.take_gradient(value)
        if gradient is None or source is None:
            return
        with torch.no_grad():
            if source.grad is not None:
                source.grad.add_(gradient)
            else:
                source.grad = _moved(gradient, source.device)

    def result_for(self, result: Any, source: Tensor) -> Any:
        """The operand, where the function has written to what it was lent of it and returns that."""
        if result is not self._value():
            return result
        marked = result.grad_fn is not None and _LENT not in result.grad_fn.metadata
        written = self._writes() != self._version
        self.bring_home()
        if marked or _has_tangent(result):
            # Its history is now the operand's, and so is its tangent; the write itself has been counted.
            if _has_tangent(result) or not _C.rebase(source, result):
                with torch.autograd._unsafe_preserve_version_counter(source):
                    source.copy_(result)
            return source
        return source if written else result

    def is_kept(self) -> bool:
        return self._value() is not None

    def release(self, watch: _C.ReleaseRefill) -> None:
        value = self._value()
        if value is not None and self._bytes is not None:
            watch.add(self._bytes, value)


def _has_tangent(value: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None


def _with_counter(value: Tensor) -> Tensor:
    """An inference tensor's memory, as a tensor that counts writes; not of one with a gradient, which nobody writes to."""
    if not value.is_inference() or value.requires_grad or value.is_conj() or value.is_neg() or value.is_sparse:
        return value
    with torch.inference_mode(False):
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage(), *place)


def _fetched_together(args: Sequence[Any], target: torch.device) -> dict[int, Tensor]:
    """By position, what is fetched of operands that are views of one storage: a write to one of these is one to the others."""
    places: dict[int, list[int]] = {}
    for number, value in enumerate(args):
        if type(value) not in (Tensor, Parameter) or is_functorch_wrapped_tensor(value):
            continue
        if is_offload(value) and value.layout is torch.strided:
            places.setdefault(value.untyped_storage()._cdata, []).append(number)
    values: dict[int, Tensor] = {}
    for numbers in places.values():
        if len(numbers) > 1:
            values.update(zip(numbers, _C.fetch_together([args[number] for number in numbers], target), strict=True))
    return values


def _lend(args: Sequence[Any], target: torch.device) -> tuple[list[Any], list[tuple[_Lent, Tensor]]]:
    """What a function is given, and what of that is lent, each with its source."""
    given, lent = [], []
    together = _fetched_together(args, target)
    for number, source in enumerate(args):
        value = together[number] if number in together else fetched(source, target)
        # Of functorch's wrappers, what is inside is lent further down.
        if value is not source and type(value) is Tensor and not is_functorch_wrapped_tensor(value):
            value = _with_counter(value)
            if not value.is_inference():
                lent.append((_Lent(source, value, target), source))
        given.append(value)
    return given, lent


def _tensors(results: Any) -> list[Tensor]:
    results = results if isinstance(results, (tuple, list)) else [results]
    return [result for result in results if isinstance(result, Tensor)]


def _watch_backward(nodes: set[Any], results: list[Tensor], lent: list[_Lent], watch: _C.ReleaseRefill) -> None:
    def bring_home(*gradients: Any) -> None:
        for operand in lent:
            operand.bring_home()
            operand.bring_gradient()

    for node in nodes:
        node.register_hook(bring_home)  # before the memory is given up, which is the hook that comes next
    for operand in lent:
        operand.release(watch)
    watch.finish(results)


def _own(value: Any) -> Any:
    """A copy of what is memory of the cache, or of a Block: who gets it may write to it, and keep it."""
    return value.clone() if isinstance(value, Tensor) and _C.is_fetched(value) else value


def _results_for(results: Any, lent: list[tuple[_Lent, Tensor]]) -> Any:
    def found(result: Any) -> Any:
        for operand, source in lent:
            result = operand.result_for(result, source)
        return tree_map(_own, result)

    return tuple(map(found, results)) if type(results) is tuple else found(results)


def call_fetched(function: Callable[..., Any], args: Iterable[Any], target: torch.device, **kwargs: Any) -> Any:
    """Calls a function with what is fetched of its offload operands. What it writes to them, or keeps, is seen to as above."""
    watch = _C.ReleaseRefill(target)
    args = tuple(args)
    given, lent = _lend(args, target)
    devices = _devices(args, given, target)
    try:
        made = function(*given, **kwargs)
        _want_gradients_on(_tensors(made), devices)
        results = _results_for(made, lent)
        made = _tensors(made)
        nodes = {value.grad_fn for value in made if value.grad_fn is not None}
        # An operand has its history by way of a stash, behind which the function's node isn't found.
        pairs = zip(made, _tensors(results), strict=True)
        made = [value if is_offload(result) else result for value, result in pairs]
    finally:  # also where checkpointing has ended a recomputation early
        for operand, _ in lent:
            operand.bring_home()
    del args, given
    kept = [operand for operand, _ in lent if operand.is_kept()]
    if kept:
        _watch_backward(nodes, made, kept, watch)
    return results


def _devices(args: Sequence[Any], given: Sequence[Any], target: torch.device | None) -> tuple[torch.device | None, ...]:
    """Where the gradient of each argument has to be: of a trained wrapper, which is given as it is, on offload."""
    return tuple(
        None if not isinstance(value, Tensor) else value.device if value is source else target
        for source, value in zip(args, given, strict=True)
    )


def _want_gradients_on(results: list[Tensor], devices: tuple[torch.device | None, ...]) -> None:
    for result in results:
        if isinstance(result.grad_fn, function.BackwardCFunction):
            setattr(result.grad_fn, _DEVICES, devices)
            return


def _moved(gradient: Any, device: torch.device | None) -> Any:
    if not isinstance(gradient, Tensor) or device is None:
        return gradient
    if is_offload(gradient) != (device.type == "offload"):
        move = torch.ops.offload.fetch if is_offload(gradient) else torch.ops.offload.stash
        gradient = move(gradient, device)
    return _own(gradient)  # autograd adds to it, or keeps it


def _is_left_alone(cls: type) -> bool:
    # Compiled graphs fetch by themselves. Checkpointing keeps its arguments, and hands them on as they are; so does what
    # calls a module's hooks, to the module.
    module = cls.__module__
    return module in ("torch.utils.checkpoint", "torch.nn.modules._functions") or module.startswith(
        "torch._functorch._aot_autograd."
    )


def _node_of(value: Any) -> Any:
    return value.node if isinstance(value, graph.GradientEdge) else value.grad_fn


def _lent_of(value: Any) -> tuple[weakref.ref[Tensor], torch.device] | None:
    node = _node_of(value)
    return node.metadata.get(_LENT) if node is not None and node.name() == "FetchBackward" else None


def _gradients(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of what was lent, all that there is of its source: uses of either."""
    outputs, gradients, retain_graph, create_graph, inputs, allow_unused = args
    targets = {number: lent[1] for number, lent in enumerate(map(_lent_of, inputs)) if lent is not None}
    sources = tuple(graph.GradientEdge(*_node_of(inputs[number]).next_functions[0]) for number in targets)
    found = list(run(outputs, gradients, retain_graph, create_graph, (*inputs, *sources), True, **kwargs))
    for (number, target), gradient in zip(targets.items(), found[len(inputs) :], strict=True):
        if gradient is not None:  # which has come by way of the fetch, too
            found[number] = _moved(gradient, target)
    found = found[: len(inputs)]
    if not allow_unused and any(gradient is None for gradient in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
            "the desired behavior."
        )
    return tuple(found)


def _source_of(value: Any) -> Any:
    lent = _lent_of(value)
    source = None if lent is None else lent[0]()
    return value if source is None else source


def register() -> None:
    """Puts the fetch in front of every call of ``apply`` that functorch does not handle itself."""
    single, whole = function._SingleLevelFunction, function.Function
    # Where PyTorch's own `apply` is written in Python it handles functorch first, and then asks its base.
    in_python = isinstance(whole.__dict__["apply"], classmethod)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        run = super(single, cls).apply
        if not _C.in_use() or not any(map(is_offload, args)) or _is_left_alone(cls):
            return run(*args, **kwargs)
        _watch_gradients()
        # Of functorch's own classes the operands are wrapped, and what they do is fetched for further down.
        users = issubclass(cls, whole)
        if users and torch._C._are_functorch_transforms_active():
            return run(*args, **kwargs)
        target = target_of(args) if users else None
        if target is not None:
            return call_fetched(run, args, target, **kwargs)
        results = run(*args, **kwargs)
        _want_gradients_on(_tensors(results), _devices(args, args, None))
        return results

    # Dynamo takes it for PyTorch's own if it is said to be of that file. To compile `F.apply` is then to compile a call of it.
    apply.__code__ = apply.__code__.replace(co_filename=function.__file__)
    for base in (single,) if in_python else (single, whole):
        base.apply = classmethod(apply)


def _bringing_gradients(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def apply(self: Any, *args: Any) -> Any:
        returned = backward(self, *args)
        devices = getattr(self, _DEVICES, None)
        if devices is None:
            return returned
        if not isinstance(returned, tuple):
            return _moved(returned, devices[0])
        # Beyond the operands there may be None.
        return (*map(_moved, returned, devices), *returned[len(devices) :])

    return apply


@functools.cache
def _watch_gradients() -> None:
    """For what functions with offload operands return from backward, and ask autograd for. From the first of these on."""
    for name in ("apply", "apply_boxed"):  # by the one or the other the engine calls a backward
        if backward := getattr(function.BackwardCFunction, name, None):
            setattr(function.BackwardCFunction, name, _bringing_gradients(backward))
    run = graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # As torch.autograd.grad() and torch.autograd.backward() call it.
        if len(args) >= 5 and any(_lent_of(value) is not None for value in args[4]):
            if not kwargs.get("accumulate_grad"):
                return _gradients(run, args, kwargs)
            args = (*args[:4], tuple(map(_source_of, args[4])), *args[5:])
        return run(*args, **kwargs)

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
