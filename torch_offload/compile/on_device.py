"""The pass over inductor's graphs: what is done to offload tensors is done on the device, between fetches and stashes.

Most of a graph is so already, since the generic kernel runs while it is traced. What is left are writes in place, which PyTorch
traces as new values and a `copy_` at the end, and factories. The pass runs after the partitioner and behind passes that users
set; inductor makes it part of the key of its caches.
"""

from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphModulePass, get_hash_for_files
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_map

from torch_offload import _C
from torch_offload.compile import captures
from torch_offload.compile.fakes import computing
from torch_offload.compile.graphs import (
    FETCH,
    GIVE,
    STASH,
    WRITE,
    call,
    home_of,
    infer,
    keep_what_is_overwritten,
    return_copies,
    storages,
)
from torch_offload.compile.lookups import look_up_rows

# Views with a bit that says to compute, which generated code does at once.
_LAZY = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)
# What gives a tensor another's memory, as `w.data = value` does (the second from PyTorch 2.15 on), where both stay where they
# are; and what gives a storage another size.
_RESEATS = ("aten::set_", "aten::shallow_copy_data_", "inductor::resize_storage_bytes_")


def _is_view(op: torch._ops.OpOverload) -> bool:
    if op in _LAZY:
        return False
    return any(value.alias_info is not None and not value.alias_info.is_write for value in op._schema.returns)


def _copies(node: fx.Node) -> bool:
    """Of a reshape, which inductor makes of views: whether it is none of what is laid out otherwise by now."""
    if node.target is not torch.ops.aten.reshape.default or not home_of(node.args[0]):
        return False
    infer(node)
    return storages(node).isdisjoint(storages(node.args[0]))


def _may_be_reinplaced(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    if isinstance(target, torch._ops.HigherOrderOperator):
        # Those that stand for one that writes. Others write to no operand of theirs.
        return name.startswith(("auto_functionalized", "triton_kernel_wrapper", "with_effects"))
    return "scatter" in name or "index_put" in name


def _stash_behind(graph: fx.Graph, node: fx.Node, home: torch.device) -> None:
    with graph.inserting_after(node):
        stashed = call(graph, STASH, node, home)
    node.replace_all_uses_with(stashed, delete_user_cb=lambda user: user is not stashed)


def _results(node: fx.Node) -> list[fx.Node]:
    """The tensors that it gives, with the values that they have now: it, or what takes it apart."""
    infer(node)
    if isinstance(node.meta["val"], torch.Tensor):
        return [node]
    return [result for user in list(node.users) for result in _results(user)]


def _move(graph: fx.Graph, node: fx.Node) -> None:
    """Fetches a node's operands, and stashes what it gives if that was on offload."""
    stays = home_of(node) is None
    home = home_of([node, node.all_input_nodes])
    device = _C.paired_device(home.index or 0)

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "offload":
            return computing(device)
        return call(graph, FETCH, value, device) if isinstance(value, fx.Node) and home_of(value) else value

    with graph.inserting_before(node):
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))
    if stays:
        return  # and what it gives is what was traced: a number that was read has its symbol
    for result in _results(node):
        _stash_behind(graph, result, home)


def _check_kernel(node: fx.Node) -> None:
    if getattr(node.target, "__name__", "").startswith("triton_kernel_wrapper") and home_of(node.all_input_nodes):
        raise NotImplementedError(
            "torch.compile: a Triton kernel is called with an offload tensor, whose bytes are in host memory and may be on "
            "their way; make the kernel an operation with torch.library.triton_op, whose operands are fetched."
        )


def _check_writes(node: fx.Node) -> None:
    """Of operations that write, PyTorch traces new values, and copies these; another would write to what is fetched."""
    schema = node.target._schema
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and home_of(given.get(argument.name)):
            raise NotImplementedError(
                f"torch.compile: {schema.name} writes to an offload tensor (its argument {argument.name}), and PyTorch has not "
                "traced the write as a new value; call it outside the compiled function."
            )


def _write(graph: fx.Graph, node: fx.Node) -> None:
    """The `copy_` with which a graph ends that changes one of its inputs."""
    target, value = node.args[:2]
    with graph.inserting_before(node):
        call(graph, WRITE, target, value)
    node.replace_all_uses_with(target)
    graph.erase_node(node)


def _skip_round_trips(graph: fx.Graph) -> None:
    """What a graph stashes and reads itself is taken from before the stash."""
    for node in list(graph.nodes):
        if node.target not in (FETCH, WRITE):
            continue
        place = 0 if node.target is FETCH else 1
        source = node.args[place]
        if not isinstance(source, fx.Node) or source.target is not STASH:
            continue
        value = source.args[0]
        if node.target is WRITE:
            node.update_arg(place, value)
        elif value.meta["val"].device == node.meta["val"].device:
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def _give(graph: fx.Graph) -> None:
    """What a graph made for itself alone, and stashes, gives its memory away instead of being copied."""
    if config.triton.cudagraphs:
        return  # the memory may belong to a CUDA graph
    held: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or node.target is FETCH:
            held |= storages(node)
        elif node.op == "output":
            held |= storages(node.args)
    for node in graph.nodes:
        if node.target is STASH and not held & storages(node.args[0]):
            node.target = GIVE


def _keep_from_writes(graph: fx.Graph) -> None:
    """Inductor makes some operations write into an operand that is used no more; what is fetched or given has other readers."""
    shared: set[int] = set()
    for node in graph.nodes:
        if node.target in (FETCH, GIVE):
            shared |= storages(node if node.target is FETCH else node.args[0])

    def kept(value: Any) -> Any:
        if not isinstance(value, fx.Node) or not shared & storages(value):
            return value
        return call(graph, torch.ops.aten.clone.default, value)

    for node in list(graph.nodes):
        if node.op == "call_function" and _may_be_reinplaced(node.target):
            with graph.inserting_before(node):
                node.args, node.kwargs = tree_map(kept, (node.args, node.kwargs))


class OnDevice(CustomGraphModulePass):
    """The pass; see above."""

    def __call__(self, graph_module: fx.GraphModule) -> None:
        if V.aot_compilation:
            raise NotImplementedError(
                "torch_offload: AOTInductor packages code without Python, and weights on offload need this package to be "
                "fetched; package the model with its weights on the device that computes, or use torch.compile."
            )
        graph = graph_module.graph
        for node in list(graph.nodes):
            _check_kernel(node)
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            if node.target.namespace == "offload" or node.target._schema.name in _RESEATS:
                continue
            if _is_view(node.target) and not _copies(node):
                continue
            if node.target is torch.ops.aten.copy_.default and home_of(node.args[0]):
                _write(graph, node)
            elif home_of([node, node.all_input_nodes]):
                _check_writes(node)
                _move(graph, node)
        keep_what_is_overwritten(graph)  # fetches that were there, and those of what was moved
        _skip_round_trips(graph)
        if not config.triton.cudagraphs:  # which read the same memory at each replay
            look_up_rows(graph)
        return_copies(graph)
        _give(graph)
        _keep_from_writes(graph)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Of all that decides on what ends up in a cache: this package, some of which is traced, where it computes, and whether
        CUDA graphs may hold its fetches.

        Inductor asks for every graph, also of programs without offload tensors.
        """
        files = [*sorted(Path(__file__).parents[1].rglob("*.py")), _C.__file__]
        where = str(_C.paired_device(0)) + str(captures.were_possible()) if _C.in_use() else ""
        return get_hash_for_files(tuple(map(str, files))) + where.encode()
