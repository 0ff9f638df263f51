"""What the passes over graphs share: where values live, which memory is written to, and operations that are put in between.

Nothing here imports inductor: a program that compiles without it has no use for it.
"""

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

FETCH, STASH = torch.ops.offload.fetch.default, torch.ops.offload.stash.default
GIVE, WRITE = torch.ops.offload.give.default, torch.ops.offload.write_.default
LOOK_UP = torch.ops.offload.look_up.default


# What PyTorch 2.15 notes on an input that its runtime writes to behind a forward, as autograd has to see that write.
_WRITTEN_BEHIND = "aot_runtime_epilogue_input_mutation"


def tensors(nodes: Any) -> list[torch.Tensor]:
    """The values of all nodes in a structure of arguments."""
    values = [node.meta.get("val") for node in tree_leaves(nodes) if isinstance(node, fx.Node)]
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def home_of(nodes: Any) -> torch.device | None:
    """The offload device of the first such value; None where there is none."""
    return next((value.device for value in tensors(nodes) if value.device.type == "offload"), None)


def storages(nodes: Any) -> set[int]:
    """Two values share memory where they share one of these."""
    return {value.untyped_storage()._cdata for value in tensors(nodes)}


def infer(node: fx.Node) -> None:
    """Gives a node the value that compilers read shapes, strides and devices from."""
    args, kwargs = tree_map(
        lambda value: value.meta["val"] if isinstance(value, fx.Node) else value, (node.args, node.kwargs)
    )
    fakes = [value for value in tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)]
    with fakes[0].fake_mode if fakes else torch._guards.detect_fake_mode():
        node.meta["val"] = node.target(*args, **kwargs)


def call(graph: fx.Graph, op: Any, *args: Any) -> fx.Node:
    """A new node at the place where the graph inserts."""
    node = graph.call_function(op, args)
    infer(node)
    return node


def keep_what_is_overwritten(graph: fx.Graph) -> set[int]:
    """The inputs that the graph writes to, or whoever calls it with what it returns, as storages().

    Where there is no cache, what is fetched of them is their own memory, and graphs don't know: such fetches are made of copies
    from before the write. A fetch through the cache has memory of its own, which no later write changes.
    """
    written: set[int] = set()
    for node in graph.nodes:
        if node.target in (torch.ops.aten.copy_.default, WRITE):
            written |= storages(node.args[0])
        elif node.meta.get(_WRITTEN_BEHIND, False):
            written |= storages(node)
    for node in graph.nodes:
        if node.target is not FETCH or not written & storages(node.args[0]):
            continue
        source, device = node.args
        if device.type == "cpu" and device.index is None:
            with graph.inserting_before(node):
                copy = call(graph, STASH, source, source.meta["val"].device)
            copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.update_arg(0, copy)
    return written


def _before_stashes(fetch: fx.Node) -> fx.Node:
    """What a fetch gives again, of which nobody else wants what is in between."""
    value = fetch
    while (
        value.target is FETCH
        and len(value.users) == 1
        and value.args[0].target is STASH
        and len(value.args[0].users) == 1
    ):
        value = value.args[0].args[0]
    return value


def add_without_stashing(graph: fx.Graph) -> None:
    """Of a weight that is used several times, backward stashes each gradient, and fetches them to add them up.

    Without that they are what compilers know of a sum: part of the product that makes the last of them.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.add.Tensor:
            continue
        for source in node.all_input_nodes:
            value = _before_stashes(source)
            if value is source or value.meta["val"].device != source.meta["val"].device:
                continue
            node.replace_input_with(source, value)
            while source is not value:
                gone, source = source, source.args[0]
                graph.erase_node(gone)


def return_copies(graph: fx.Graph) -> None:
    """Who gets what a graph returns may write to it: no output is memory that a fetch gave."""
    fetched = {storage for node in graph.nodes if node.target is FETCH for storage in storages(node)}

    def copied(value: Any) -> Any:
        if not isinstance(value, fx.Node) or not fetched & storages(value):
            return value
        return call(graph, torch.ops.aten.clone.default, value)

    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = tree_map(copied, output.args)
