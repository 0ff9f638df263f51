"""Lookups in large tables: `look_up` has the table for its operand, and reads rows of it where they are, or fetches it.

Behind a fetch a table has been moved by the time that anybody asks how much of it is read. Which of the two is better is
decided when the graph runs (`csrc/aten/lookup.h`). A table that is known to be small, or to be read for the most part, is
fetched, and inductor makes the lookup part of a kernel.
"""

from collections import defaultdict

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_offload import _C
from torch_offload.compile.graphs import FETCH, LOOK_UP, call

_aten = torch.ops.aten
_NOT_INDEXED = (torch.uint16, torch.uint32, torch.uint64)  # by PyTorch 2.11 on CUDA


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """The table and the index of an operation that gives ``table[index]``; None of another one."""
    if node.target is _aten.embedding.default:
        table, index = node.args[:2]
    elif node.target in (_aten.index.Tensor, _aten._unsafe_index.Tensor) and len(node.args[1]) == 1:
        table, (index,) = node.args
    else:
        return None, None
    counts = index.meta["val"].dtype in (torch.int64, torch.int32)
    return (table, index) if counts and index.meta["val"].device == node.meta["val"].device else (None, None)


def _may_be_read_in_place(table: torch.Tensor, rows: int | torch.SymInt) -> bool:
    """Whether ``look_up`` could; where it can't, it would only take a lookup out of the kernel that inductor makes of it."""
    small = statically_known_true(table.numel() * table.element_size() <= _C.LEAST_TABLE)
    most = statically_known_true(2 * rows > table.shape[0])
    return not small and not most and is_contiguous_or_false(table) and table.dtype not in _NOT_INDEXED


def look_up_rows(graph: fx.Graph) -> None:
    """Puts `look_up` in the place of lookups in what was fetched; the table's other uses have their fetches as before."""
    lookups: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)  # by the table: each with its index
    for node in graph.nodes:
        table, index = _operands(node)
        if table is not None and table.target is FETCH and table.args[1].index is not None:
            lookups[table.args[0]].append((node, index))
    for table, found in lookups.items():
        rows = sum(index.meta["val"].numel() for _, index in found)
        if not _may_be_read_in_place(table.meta["val"], rows):
            continue
        for node, index in found:
            with graph.inserting_before(node):
                looked_up = call(graph, LOOK_UP, table, index)
            node.replace_all_uses_with(looked_up)
            graph.erase_node(node)
