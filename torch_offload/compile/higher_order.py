"""Operations that take functions (``torch.cond``, loops, ``flex_attention``): beside activations, their offload operands are
fetched first.

What the functions capture is an operand too. PyTorch runs them below autograd, and there no kernel of ours stands above its
fake tensors: they would compute on two devices. Fetched before, an operand is what the function's author assumed, as it is for
an autograd Function; and it stays on the device until the operation is done, also where only one of two branches reads it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from torch_offload import _functions
from torch_offload._wrappers import target_of

# Not all torch versions have all of them.
_NAMES = ["associative_scan", "cond", "flex_attention", "invoke_subgraph", "map_impl", "scan", "switch", "while_loop"]


def _check_is_read(op: torch._ops.HigherOrderOperator, value: torch.Tensor) -> None:
    """Functions that write to what they capture are refused by PyTorch, but where graphs are traced of `invoke_subgraph`."""
    if isinstance(value, FunctionalTensor) and torch._functionalize_has_data_mutation(value.elem):
        raise NotImplementedError(
            f"torch.compile: a function that {op.name()} calls writes to an offload tensor, of which it has a copy on the "
            "device; let it return the new value, and write that outside of the function."
        )


def _fetching(op: torch._ops.HigherOrderOperator) -> Callable[..., Any]:
    """The kernel for operands of which one is on offload."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs))
        target = target_of(flat)
        if target is None:
            return op.py_kernels[DispatchKey.Autograd](*args, **kwargs)

        def call(*fetched: Any) -> Any:
            args, kwargs = pytree.tree_unflatten(fetched, spec)
            results = op(*args, **kwargs)
            for source, value in zip(flat, fetched, strict=True):
                if value is not source:
                    _check_is_read(op, value)
            return results

        return _functions.call_fetched(call, flat, target)

    return kernel


def register() -> None:
    """Registers the kernels. PyTorch imports these operations itself, and no compiler with them."""
    for name in _NAMES:
        op = getattr(torch.ops.higher_order, name, None)
        if op is not None:
            op.fallthrough(DispatchKey.AutocastPrivateUse1)
            op.py_impl(DispatchKey.AutogradPrivateUse1)(_fetching(op))
