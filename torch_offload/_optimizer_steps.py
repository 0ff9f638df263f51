"""PyTorch's own algorithms of optimizers, run on host bytes one parameter after the other, and the for-loops piece by piece.

``torch.optim`` has a function for each algorithm, ``_single_tensor_adam`` and so on, that loops over parameters and does a
dozen operations to each. Where these are elementwise, and most are, what it does to one parameter is written down and then
done to the pieces of all that are in the same state (Note [Piece by piece] in csrc/aten/elementwise_program.h). The bits are
those of the loop. The fused algorithms get one parameter at a time. Both go in reverse order: backward makes the last ones'
gradients first, and a lease waits for its own, so the host steps these while the GPU makes the others; but not where
parameters share memory, whose steps follow each other.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torch_offload import _C
from torch_offload._elementwise import NotElementwise, record

_ALGORITHMS = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")

Algorithm = Callable[..., None]


class _Row:
    """One parameter, its gradient and what the optimizer keeps for it: tensors like it, 0-dim counts of steps, and None."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values
        tensors = [value for value in values if value is not None]
        self.counts = [value for value in tensors if value.dim() == 0 and value.device.type == "cpu"]
        self.operands = [value for value in tensors if value.dim() > 0]
        self.fits = (
            len(self.counts) + len(self.operands) == len(tensors)
            and values[0].numel() > 0
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

    def __init__(self, loop: Callable[[list[list[Any]]], None], row: _Row) -> None:
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


def _step_of(loop: Callable[[list[list[Any]]], None], row: _Row) -> _Step | None:
    try:
        return _Step(loop, row)
    except NotElementwise:
        return None


def _applies(parameters: Sequence[Tensor], settings: dict[str, Any]) -> bool:
    return (
        len(parameters) > 0
        and _C.HostScope.active()
        and not torch.is_grad_enabled()
        and not settings.get("differentiable")
        and not settings.get("capturable")
        and all(parameter.device.type == "offload" for parameter in parameters)
    )


class _Lists:
    """What an algorithm is given: lists with one entry for each parameter, and what is the same for all of them."""

    def __init__(self, algorithm: Algorithm, given: Sequence[Any], settings: dict[str, Any]) -> None:
        self._algorithm, self._given, self._settings = algorithm, given, settings
        # Lists of other lengths are empty ones, of state that these settings don't need.
        self._wanted = [
            k for k, values in enumerate(given) if isinstance(values, list) and len(values) == len(given[0])
        ]

    def row(self, index: int) -> list[Any]:
        return [self._given[k][index] for k in self._wanted]

    def order(self) -> Iterable[int]:
        """Backward makes the last gradient first. But what shares memory with another parameter is in the loop's order."""
        count = len(self._given[0])
        found: dict[int, int] = {}  # by storage: who has it; no parameter has that of a sparse gradient
        for index in range(count):
            for value in self.row(index):
                if not isinstance(value, Tensor) or value.layout is not torch.strided:
                    continue
                if found.setdefault(value.untyped_storage()._cdata, index) != index:
                    return range(count)
        return reversed(range(count))

    def call(self, columns: Sequence[list[Any]]) -> None:
        """The algorithm for other lists in their places."""
        lists = dict(zip(self._wanted, columns, strict=True))
        self._algorithm(*[lists.get(k, values) for k, values in enumerate(self._given)], **self._settings)

    def call_for(self, index: int) -> None:
        """The algorithm for one parameter, which may put new state into the lists."""
        columns = [[value] for value in self.row(index)]
        self.call(columns)
        for k, (value,) in zip(self._wanted, columns, strict=True):
            self._given[k][index] = value


def _one_by_one(algorithm: Algorithm) -> Algorithm:
    @functools.wraps(algorithm)
    def run(parameters: list[Tensor], *others: Any, **settings: Any) -> None:
        # A compiled step is traced as it is, and nothing that can't be traced comes before this.
        if torch.compiler.is_dynamo_compiling() or not _applies(parameters, settings):
            return algorithm(parameters, *others, **settings)
        lists = _Lists(algorithm, [parameters, *others], settings)
        for index in lists.order():
            lists.call_for(index)
        return None

    return run


def _piece_by_piece(loop: Algorithm) -> Algorithm:
    one_by_one = _one_by_one(loop)

    @functools.wraps(loop)
    def run(parameters: list[Tensor], *others: Any, **settings: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return loop(parameters, *others, **settings)
        watched = _get_current_dispatch_mode() is not None  # by somebody who shall see every operation
        if (
            watched
            or not _applies(parameters, settings)
            or any(isinstance(value, Tensor) for value in settings.values())
        ):
            return one_by_one(parameters, *others, **settings)
        lists = _Lists(loop, [parameters, *others], settings)
        steps: dict[tuple[Any, ...], _Step | None] = {}
        for index in lists.order():
            row = _Row(lists.row(index))
            step = None
            if row.fits:
                state = row.state()
                if state not in steps:
                    steps[state] = _step_of(lists.call, row)
                step = steps[state]
            if step is not None:
                step.run(row)
            else:
                lists.call_for(index)
        return None

    return run


@functools.cache
def install() -> None:
    """Puts this in the place of PyTorch's algorithms; they stay as they are for what is not on offload."""
    for name in _ALGORITHMS:
        module = importlib.import_module(f"torch.optim.{name}")
        for prefix, wrap in (("_single_tensor_", _piece_by_piece), ("_fused_", _one_by_one)):
            algorithm = getattr(module, prefix + name, None)
            if algorithm is not None:
                wrapped: Any = wrap(algorithm)
                # TorchScript compiles the algorithm itself: it would look for the algorithm's names among those of this file.
                wrapped.__script_if_tracing_wrapper = True
                wrapped.__original_fn = algorithm
                setattr(module, prefix + name, wrapped)
