"""PyTorch's own for-loop of an optimizer, run on the host bytes of each parameter piece by piece.

``torch.optim`` has a function for each algorithm, ``_single_tensor_adam`` and so on, that loops over parameters and does a
dozen operations to each. Where these are elementwise, and most are, what it does to one parameter is written down and then
done to the pieces of all that are in the same state (Note [Piece by piece] in csrc/aten/elementwise_program.h). The bits are
those of the loop. The parameters come in reverse order: backward makes the last ones' gradients first, so the host works on
these while the GPU makes the others.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torch_offload import _C
from torch_offload._elementwise import NotElementwise, record

_ALGORITHMS = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
SMALLEST = 1 << 14  # elements of a parameter for which it is worth while

Loop = Callable[..., None]


class _Row:
    """One parameter, its gradient and what the optimizer keeps for it: tensors like it, 0-dim counts of steps, and None."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values
        tensors = [value for value in values if value is not None]
        self.counts = [value for value in tensors if value.dim() == 0 and value.device.type == "cpu"]
        self.operands = [value for value in tensors if value.dim() > 0]
        self.fits = (
            len(self.counts) + len(self.operands) == len(tensors)
            and values[0].numel() >= SMALLEST
            and _C.ElementwiseProgram.fits(self.operands)
        )

    def state(self) -> tuple[Any, ...]:
        """What the operations depend on, besides the settings that all parameters share."""
        return tuple(
            None if value is None else (value.dtype, value.item() if value.dim() == 0 else None)
            for value in self.values
        )

    def replaced(self, operands: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Any]:
        """The same row of other tensors."""
        by_id = {id(old): new for old, new in zip([*self.operands, *self.counts], [*operands, *counts], strict=True)}
        return [by_id.get(id(value)) for value in self.values]


class _Step:
    """What a loop does to a row, and what it makes of the counts."""

    def __init__(self, loop: Loop, row: _Row) -> None:
        self.counts = [count.clone() for count in row.counts]

        def code(stand_ins: list[Tensor]) -> None:
            columns = [[value] for value in row.replaced(stand_ins, self.counts)]
            before = [column[0] for column in columns]
            loop(columns)
            if any(column[0] is not value for column, value in zip(columns, before, strict=True)):
                raise NotElementwise("the optimizer makes new state")

        self._program = record(code, row.operands)

    def run(self, row: _Row) -> None:
        self._program.run(row.operands)
        for count, value in zip(row.counts, self.counts, strict=True):
            count.copy_(value)


def _step_of(loop: Loop, row: _Row) -> _Step | None:
    try:
        return _Step(loop, row)
    except NotElementwise:
        return None


def _applies(parameters: Sequence[Tensor], settings: dict[str, Any]) -> bool:
    return (
        _C.HostScope.active()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and _get_current_dispatch_mode() is None
        and not settings.get("differentiable")
        and not settings.get("capturable")
        and not any(isinstance(value, Tensor) for value in settings.values())
    )


def _piece_by_piece(loop: Loop) -> Loop:
    @functools.wraps(loop)
    def run(parameters: list[Tensor], *others: Any, **settings: Any) -> None:
        lists = [parameters, *others]
        # Lists of other lengths are empty ones, of state that these settings don't need.
        wanted = [k for k, values in enumerate(lists) if isinstance(values, list) and len(values) == len(parameters)]
        if not parameters or not _applies(parameters, settings):
            return loop(parameters, *others, **settings)

        def loop_of_one(columns: list[list[Any]]) -> None:
            given = dict(zip(wanted, columns, strict=True))
            loop(*[given.get(k, values) for k, values in enumerate(lists)], **settings)

        steps: dict[tuple[Any, ...], _Step | None] = {}
        for index in reversed(range(len(parameters))):
            row = _Row([lists[k][index] for k in wanted])
            state = row.state() if row.fits else None
            if row.fits and state not in steps:
                steps[state] = _step_of(loop_of_one, row)
            step = steps[state] if row.fits else None
            if step is not None:
                step.run(row)
                continue
            columns = [[value] for value in row.values]
            loop_of_one(columns)
            for k, (value,) in zip(wanted, columns, strict=True):
                lists[k][index] = value
        return None

    return run


@functools.cache
def install() -> None:
    """Puts this in the place of PyTorch's loops; they stay as they are for what is not on offload."""
    for name in _ALGORITHMS:
        module = importlib.import_module(f"torch.optim.{name}")
        loop = getattr(module, f"_single_tensor_{name}", None)
        if loop is not None:
            setattr(module, f"_single_tensor_{name}", _piece_by_piece(loop))
