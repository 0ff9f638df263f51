"""Operations that take functions (``torch.cond``, loops, ``flex_attention``): beside activations, their offload operands are
fetched first.

What the functions capture is an operand too. PyTorch runs them below autograd, and there no kernel of ours stands above its
fake tensors: they would compute on two devices. Fetched before, an operand is what the function's author assumed, as it is for
an autograd Function; and it stays on the device until the operation is done, also where only one of two branches reads it.

Of offload operands alone, loops over slices are taken whole, too, and what they give is stashed: inductor makes loops of its
own of them, and PyTorch differentiates them with carries that it makes itself.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from torch_offload import _C, _functions
from torch_offload._wrappers import device_for, is_offload, target_of
from torch_offload.compile import fakes

# Not all torch versions have all of them.
_NAMES = ["associative_scan", "cond", "flex_attention", "invoke_subgraph", "map_impl", "scan", "switch", "while_loop"]
_LOOPS = ["map_impl", "scan"]


def _check_is_read(op: torch._ops.HigherOrderOperator, value: torch.Tensor) -> None:
    """Functions that write to what they capture are refused by PyTorch, but where graphs are traced of `invoke_subgraph`."""
    if isinstance(value, FunctionalTensor) and torch._functionalize_has_data_mutation(value.elem):
        raise NotImplementedError(
            f"torch.compile: a function that {op.name()} calls writes to an offload tensor, of which it has a copy on the "
            "device; let it return the new value, and write that outside of the function."
        )


def _names_offload(value: Any) -> bool:
    return isinstance(value, (torch.device, str)) and str(value).partition(":")[0] == "offload"


def _on_device(function: Any, target: torch.device) -> Any:
    """A function that was traced; where that makes tensors on offload, another one, which makes them on the device."""
    graphs = [each.graph for each in function.modules()] if isinstance(function, fx.GraphModule) else []
    leaves = (pytree.tree_leaves((node.args, node.kwargs)) for graph in graphs for node in graph.nodes)
    if not any(map(_names_offload, itertools.chain.from_iterable(leaves))):
        return function
    copied = fx.GraphModule(function, copy.deepcopy(function.graph))
    for node in copied.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(
            lambda value: fakes.computing(target) if _names_offload(value) else value, (node.args, node.kwargs)
        )
    for name, child in function.named_children():
        setattr(copied, name, _on_device(child, target))
    copied.recompile()
    return copied


def _fetching(op: torch._ops.HigherOrderOperator) -> Callable[..., Any]:
    """The kernel for operands of which one is on offload."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        target, home = target_of(flat), None
        if target is None:
            if op.name() not in _LOOPS or _C.HostScope.active():
                return op.py_kernels[DispatchKey.Autograd](*args, **kwargs)
            target, home = device_for(flat), next(value.device for value in flat if is_offload(value))
            flat = [_on_device(value, target) for value in flat]

        def call(*fetched: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(fetched, spec)
            results = op(*args, **kwargs)
            for source, value in zip(flat, fetched, strict=True):
                if value is not source:
                    _check_is_read(op, value)
            return results

        results = _functions.call_fetched(call, flat, target)
        if home is None:
            return results
        return pytree.tree_map_only(torch.Tensor, lambda value: torch.ops.offload.stash(value, home), results)

    return kernel


def register() -> None:
    """Registers the kernels. PyTorch imports these operations itself, and no compiler with them."""
    for name in _NAMES:
        op = getattr(torch.ops.higher_order, name, None)
        if op is not None:
            op.fallthrough(DispatchKey.AutocastPrivateUse1)
            op.py_impl(DispatchKey.AutogradPrivateUse1)(_fetching(op))
