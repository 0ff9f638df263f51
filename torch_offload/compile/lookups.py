"""Lookups in large tables: `look_up` has the table for its operand, and reads rows of it where they are, or fetches it.

Behind a fetch a table has been moved by the time that anybody asks how much of it is read. Which of the two is better is
decided when the graph runs (`csrc/aten/lookup.h`). What is known to be small is fetched, and inductor makes its lookup part of
a kernel.
"""

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_offload import _C
from torch_offload.compile.graphs import FETCH, LOOK_UP, call

_aten = torch.ops.aten
_NOT_INDEXED = (torch.uint16, torch.uint32, torch.uint64)  # by PyTorch 2.11 on CUDA


def _rows_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The table and the index of an operation that gives ``table[index]``; None of another one."""
    if node.target is _aten.embedding.default:
        table, index = node.args[:2]
    elif node.target in (_aten.index.Tensor, _aten._unsafe_index.Tensor) and len(node.args[1]) == 1:
        table, (index,) = node.args
    else:
        return None
    counts = index.meta["val"].dtype in (torch.int64, torch.int32)
    return (table, index) if counts and index.meta["val"].device == node.meta["val"].device else None


def _may_be_large(table: torch.Tensor) -> bool:
    small = statically_known_true(table.numel() * table.element_size() <= _C.LEAST_TABLE)
    return not small and table.dtype not in _NOT_INDEXED


def look_up_rows(graph: fx.Graph) -> None:
    """Puts `look_up` in the place of lookups in what was fetched; the table's other uses have the fetch as before."""
    for node in list(graph.nodes):
        if (found := _rows_of(node)) is None:
            continue
        table, index = found
        if table.target is FETCH and table.args[1].index is not None and _may_be_large(table.meta["val"]):
            with graph.inserting_before(node):
                rows = call(graph, LOOK_UP, table.args[0], index)
            node.replace_all_uses_with(rows)
            graph.erase_node(node)
