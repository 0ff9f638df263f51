"""Python code that does elementwise operations to tensors, written down once and run on host bytes piece by piece."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_offload import _C


class NotElementwise(Exception):  # noqa: N818 - a case, not a mistake
    """The code does something else than elementwise operations."""


@functools.cache
def _to_out(func: Any) -> Any:
    """The overload that takes the same and writes to `out=`: memory that is there already."""

    def taken(arguments: Any) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in arguments]

    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        *others, last = overload._schema.arguments
        if last.name == "out" and last.is_out and taken(others) == taken(func._schema.arguments):
            return overload
    raise NotElementwise(f"{func} to memory that is there already")


class _Recorder(TorchDispatchMode):
    """Writes down what is done to the stand-ins; what is done to other tensors is just done."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[tuple[str, str, list[Any]]] = []
        self.temporaries: list[torch.dtype] = []
        self._kept = list(operands)  # so that no other tensor gets the id of one
        self._registers = {id(operand): number for number, operand in enumerate(operands)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(id(leaf) in self._registers for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        # Random numbers are drawn in an order, which pieces would change.
        if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
            raise NotElementwise(str(func))
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise NotElementwise(str(func))
        number = self._registers.get(id(result))  # known where it was written in place, or to `out=`
        if number is None:
            number = self._registers[id(result)] = len(self._kept)
            self._kept.append(result)
            self.temporaries.append(result.dtype)
            func, kwargs = _to_out(func), {**kwargs, "out": result}
        values = [
            self._value(args[k] if k < len(args) else kwargs.get(argument.name, argument.default_value))
            for k, argument in enumerate(func._schema.arguments)
        ]
        self.steps.append((func._schema.name, func._schema.overload_name, values))
        return result

    def _value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, (list, tuple, torch.memory_format, torch.layout, torch.device, torch.dtype)):
                raise NotElementwise(str(value))
            return value
        if id(value) in self._registers:
            return _C.Register(self._registers[id(value)])
        if value.dim() > 0 or value.device.type != "cpu":
            raise NotElementwise("another tensor")
        return value.clone()


def record(code: Callable[[list[Tensor]], None], operands: Sequence[Tensor]) -> Any:
    """What ``code`` does to tensors such as ``operands``, as a program whose ``run(operands)`` does it to others.

    Args:
        code: is called once, with stand-ins of the operands' dtypes that have no values.
        operands: tensors of one shape.

    Raises:
        NotElementwise: where an operation is none that does the same to each element by itself.
        RuntimeError: where an operation fails on the CPU whatever the values are.
    """
    stand_ins = [torch.empty(1, dtype=operand.dtype, device="meta") for operand in operands]
    with torch.no_grad(), _Recorder(stand_ins) as recorder:
        code(stand_ins)
    program = _C.ElementwiseProgram(len(stand_ins), recorder.temporaries, recorder.steps)
    program.prepare([operand.dtype for operand in operands])
    return program
