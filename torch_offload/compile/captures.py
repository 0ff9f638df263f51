"""Weights whose fetches no CUDA graph can hold, where inductor makes CUDA graphs.

Memory that is not page-locked goes through a ring that the host fills, which no replay does. And of an input that doesn't begin
at a multiple of what inductor wants its graphs read a copy, which they make as if it were on CUDA.

With which weights a function is compiled is known: with such a one all fetches are left out, and what is between them is
captured. But compiled code may be called with others: of a block that is like the first, in another process by way of a cache,
or after a parameter was given other memory. So before each call its inputs are looked at, and where one can't be fetched in a
graph the call runs as it is, without.
"""

import functools
import inspect
from typing import Any

import torch
from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.utils import ALIGNMENT

from torch_offload import _C
from torch_offload.compile import changed

_POSSIBLE = "torch_offload_captures_were_possible"  # on the context of a trace
_COPIES = "torch_offload_copies"  # on a manager of CUDA graphs, by function


def were_possible() -> bool:
    """Whether CUDA graphs can hold fetches of all tensors that the graph which is being compiled was traced with."""
    if not config.triton.cudagraphs or (context := TracingContext.try_get()) is None:
        return True
    known = vars(context)
    if _POSSIBLE not in known:  # a backward has the context of its forward, whose tensors Dynamo has forgotten by then
        known[_POSSIBLE] = _C.can_be_captured(list(context.tensor_to_context), ALIGNMENT)
    return known[_POSSIBLE]


def _copies(manager: Any, function_id: Any, inputs: list[Any]) -> bool:
    """Whether a function's graphs would read copies of inputs on offload; which they do is decided at its first call."""
    known = vars(manager).setdefault(_COPIES, {})
    if function_id not in known:
        stay = set(manager.ids_to_funcs[function_id].static_input_idxs)
        known[function_id] = any(
            isinstance(value, torch.Tensor) and value.device.type == "offload" and k not in stay
            for k, value in enumerate(inputs)
        )
    return known[function_id]


@functools.cache
def _follow() -> None:
    # The thread that imports this first hands its graphs down to threads of autograd: it is to be one that makes graphs.
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    run = CUDAGraphTreeManager._run
    if (found := tuple(inspect.signature(run).parameters)) != ("self", "new_inputs", "function_id"):
        raise AttributeError(f"{run.__qualname__} takes {', '.join(found)}")

    @functools.wraps(run)
    def run_or_call(self: Any, new_inputs: list[Any], function_id: Any) -> Any:
        if _C.can_be_captured(new_inputs) and not _copies(self, function_id, new_inputs):
            return run(self, new_inputs, function_id)
        return self.ids_to_funcs[function_id].model(new_inputs)

    CUDAGraphTreeManager._run = run_or_call


def follow() -> None:
    """Called whenever inductor makes CUDA graphs of something.

    Raises:
        ImportError: this torch's graphs are run by another function.
    """
    if not _C.in_use():
        return
    try:
        _follow()
    except (AttributeError, ImportError) as error:
        raise changed(error) from error
