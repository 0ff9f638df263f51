"""What is fetched for forward is fetched again for backward, and not kept in between.

A compiled graph saves what its backward needs. Of a weight that is the weight, on offload, and not what was fetched: all of
them together would fill the GPU memory that offload is there to spare. PyTorch's partitioners have a mark for values that are
computed again, and every fetch gets it, whichever compiler asks them; except of an input that the graph itself writes to,
which has another value by then: that is kept as it was.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy


def _marking(has_recomputable_ops: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(has_recomputable_ops)
    def mark_fetches(graph_module: Any) -> bool:
        from torch_offload.compile import (
            graphs,  # the operations that it names are registered by now
        )

        fetches = [node for node in graph_module.graph.nodes if node.target is graphs.FETCH]
        written = graphs.keep_what_is_overwritten(graph_module.graph) if fetches else set()
        for node in fetches:
            if not written & graphs.storages(node.args[0]):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return has_recomputable_ops(graph_module)

    return mark_fetches


def recompute_fetches() -> None:
    """Called whenever a fetch is traced: the partitioners are imported by the time that matters, and not by this package."""
    partitioners = sys.modules.get("torch._functorch.partitioners")
    # Both ask this first.
    if partitioners is not None and not hasattr(partitioners.has_recomputable_ops, "__wrapped__"):
        partitioners.has_recomputable_ops = _marking(partitioners.has_recomputable_ops)
