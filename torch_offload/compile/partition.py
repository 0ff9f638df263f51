"""What is done to the graph of a forward and its backward before PyTorch cuts it in two, whichever compiler asks for that.

A compiled graph saves what its backward needs. Of a weight that is the weight, on offload, and not what was fetched: all of
them together would fill the GPU memory that offload is there to spare. PyTorch's partitioners have a mark for values that are
computed again. Every fetch gets it, and what follows from weights alone, element by element: views, copies in another layout,
casts, as autocast makes one of every weight, and weights that are unpacked. Except of an input that the graph itself writes to,
which has another value by then: that is kept as it was, and so is what the graph has made of it on offload.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

# Graphs that are not cut in two come here. It has a name of its own for what the partitioners ask.
_ASKER = "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass"


_SAME_VALUES = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.clone.default,
    torch.ops.prims.convert_element_type.default,
}


def _is_elementwise(node: Any) -> bool:
    if node.target in _SAME_VALUES or getattr(node.target, "is_view", False):
        return True
    return _is_the_same_again(node) and torch.Tag.pointwise in node.target.tags


def _is_the_same_again(node: Any) -> bool:
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or operation._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in operation.tags


def _compute_again(graph: Any, fetches: list[Any]) -> None:
    """Marks these, and what follows from them alone, element by element; but for what the user has marked."""
    from torch_offload.compile import graphs

    again, constants = set(fetches), set()
    for node in graph.nodes:
        inputs = set(node.all_input_nodes)
        if not inputs and _is_the_same_again(node):
            constants.add(node)
        if not inputs & again or not inputs <= again | constants or "recompute" in node.meta:
            continue
        if node.target is graphs.STASH or _is_elementwise(node):
            again.add(node)
    for node in again:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _keep(graph: Any, written: set[int]) -> None:
    """Marks what follows from inputs that the graph writes to: computed again it would be another value.

    That goes as far as what a fetch gives, which is made of something that is kept, or is kept.
    """
    from torch_offload.compile import graphs

    follows = {node for node in graph.nodes if node.op == "placeholder" and graphs.storages(node) & written}
    for node in graph.nodes:
        if node.op == "output" or follows.isdisjoint(node.all_input_nodes):
            continue
        fetched = node.target is graphs.FETCH
        in_memory_of_inputs = bool(graphs.storages(node.args[0] if fetched else node) & written)
        if not fetched:
            follows.add(node)
        if fetched == in_memory_of_inputs:
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _prepare(graph: Any) -> None:
    from torch_offload.compile import graphs  # the operations that it names are registered by now

    graphs.add_without_stashing(graph)
    fetches = [node for node in graph.nodes if node.target is graphs.FETCH]
    if not fetches:
        return
    written = graphs.keep_what_is_overwritten(graph)
    _keep(graph, written)
    _compute_again(graph, [node for node in fetches if not written & graphs.storages(node.args[0])])
    graphs.return_copies(graph)


def _preparing(has_recomputable_ops: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(has_recomputable_ops)
    def prepare_first(graph_module: Any) -> bool:
        _prepare(graph_module.graph)
        return has_recomputable_ops(graph_module)

    return prepare_first


def prepare_graphs() -> None:
    """Called whenever a fetch is traced: the partitioners are imported by the time that matters, and not by this package."""
    partitioners = sys.modules.get("torch._functorch.partitioners")
    if partitioners is None:
        return
    asked_first = getattr(partitioners, "has_recomputable_ops", None)  # by both
    if asked_first is None:
        raise ImportError(
            f"torch_offload: PyTorch's partitioners have changed in torch {torch.__version__}, and a compiled graph would keep "
            "what it fetches until its backward; use a torch that this release of torch_offload supports."
        )
    if not hasattr(asked_first, "__wrapped__"):
        partitioners.has_recomputable_ops = _preparing(asked_first)
    if asker := sys.modules.get(_ASKER):
        asker.has_recomputable_ops = partitioners.has_recomputable_ops
    config = sys.modules.get("torch._inductor.config")
    if config is not None and config.freezing:
        # Inductor asks for its part only after it has computed what follows from constants.
        from torch_offload.compile import register_with_inductor

        register_with_inductor()
