"""Inductor: how a graph that holds offload tensors becomes code.

Note [Graphs of one device and offload]
Inductor compiles graphs of one device, beside which there may be CPU tensors. Offload tensors are such guests too: the kernels
that it generates touch none of their bytes, which copies may be writing at the time. What touches them are calls of
``offload::fetch``, ``give`` and ``write_``, and between these the kernels are those of a graph without offload. So
  - the devices of a graph are counted without offload, but its own pass also runs where only what is inside of the graph is on
    offload; and no offload tensor is laid out anew for a convolution;
  - memory that a fetch gave is the cache's, and what is given away is a Block's: inductor reuses neither for other values, and
    frees both after their last use;
  - with CUDA graphs (`mode="reduce-overhead"`) a fetch is captured where all of the graph is. Where anything else has to be
    left out, and cuts the graph into parts, fetches are left out too: from part to part goes memory of the CUDA graphs' pool
    alone, which a fetch's isn't. So are they where one is of a tensor that is no parameter or buffer, and may be another one at
    each call, and where a weight can't be captured (`captures`). And a part returns none of its offload inputs, as it would
    what others read behind it: their caller has them;
  - with `freezing` weights are constants of a graph, and fetches of them are not computed beforehand: they would stay for ever.
    Nor does code hold the numbers of a small one, which may be written to;
  - bytes on offload are no memory of the device. Inductor orders a graph by what its steps take and give up: if a fetch seems
    to give up its operand, the order that has all fetches first is as good as any. In the order that it finds, fetches come
    late and results go home early (`order`);
  - a graph that writes to inputs which overlap keeps its order: PyTorch 2.11 moves a step past one that writes into the same
    copy.
    These are the twelve overrides here, which hold for 2.11 to 2.15, and all or none of which are made. Another is made when
    inductor first makes CUDA graphs (`captures`);
  - what is left of operations on offload tensors is moved to the device (`on_device`);
  - a kernel over offload tensors is refused.
register() runs when inductor first compiles something and asks the device module for a backend (``torch.offload.Scheduling``).
With `freezing` it runs before, when the first fetch is traced.
Whatever of inductor's it doesn't find, or finds with other parameters, is told to who has offload tensors, and to nobody else.
"""

import functools
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch._inductor import compile_fx, config, memory
from torch._inductor.codegen.common import register_backend_for_device
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.codegen.wrapper import FreeLine, PythonWrapperCodegen
from torch._inductor.compile_fx import get_static_input_idxs
from torch._inductor.constant_folding import ConstantFolder
from torch._inductor.fx_passes import post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ExternKernel, FallbackKernel, TensorBox, as_storage_and_layout
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import GPU_ALIGN_BYTES, tensor_is_aligned
from torch._inductor.virtualized import V

from torch_offload.compile import captures
from torch_offload.compile.fakes import code_of
from torch_offload.compile.graphs import FETCH, GIVE, LOOK_UP, STASH, home_of
from torch_offload.compile.on_device import OnDevice
from torch_offload.compile.order import arrange

_OF_OTHERS = "torch_offload_memory_of_others"  # names of buffers, on the graph that is being lowered
_CAPTURES = "torch_offload_captures_fetches"  # on a scheduler
_CODED_FETCH = torch.ops.offload.fetch.coded


class _NoKernels(CppScheduling):
    def codegen_node(self, node: Any) -> NoReturn:
        raise NotImplementedError(
            f"torch.compile: {node.get_name()} would compute on offload tensors without a fetch. This is a bug of "
            "torch_offload, please report it; meanwhile leave the function out of the graph with torch.compiler.disable."
        )


def _is_fetch(node: Any) -> bool:
    """Of a node of the scheduler's."""
    return getattr(node.node, "op_overload", None) is _CODED_FETCH


def _moving_inputs() -> set[str]:
    """Of the graph's inputs, by name, those that are another tensor at each call; all but parameters and buffers."""
    names = V.graph.graph_input_names
    return set() if V.graph.is_backward else set(names) - {names[k] for k in get_static_input_idxs(0)}


def _is_on_offload(buffer: Any) -> bool:
    device = buffer.get_device()
    return device is not None and device.type == "offload"


def _writes_a_part(node: Any) -> bool:
    """Of what inputs that overlap are parts of, as PyTorch traces a write to one."""
    aten = torch.ops.aten
    if node.target is aten.copy_.default:
        return getattr(node.args[0], "target", None) is aten.as_strided.default
    return node.target is aten.as_strided_scatter.default


def _original(owner: Any, name: str, *parameters: str) -> Callable[..., Any]:
    function = getattr(owner, name)
    if (found := tuple(inspect.signature(function).parameters)) != parameters:
        raise AttributeError(f"{function.__qualname__} takes {', '.join(found)} and not {', '.join(parameters)}")
    return function


def _override() -> None:
    count = _original(GraphLowering, "add_device_info", "self", "device")
    prefer_channels_last = _original(GraphLowering, "find_nodes_prefer_channels_last", "self")
    devices_outside = _original(post_grad, "get_all_devices", "gm")
    free = _original(PythonWrapperCodegen, "codegen_free", "self", "buffer")
    cuts = _original(Scheduler, "should_partition", "self", "node")
    signatures_of = _original(Scheduler, "get_graph_partition_signature", "self", "partitions", "skip_cudagraphs")
    fold = _original(ConstantFolder, "run_node", "self", "node")
    constant = _original(GraphLowering, "get_attr", "self", "target", "args", "kwargs")
    _original(GraphLowering, "add_tensor_constant", "self", "data", "name")
    sizes_of = _original(memory, "compute_size_for_scheduler_buffer", "name_to_buf")
    freeable = _original(memory, "get_freeable_input_buf", "nodes", "graph_inputs")
    reorder = _original(
        memory,
        "reorder_for_peak_memory",
        *["nodes", "name_to_buf", "name_to_fused_node", "graph_inputs", "graph_outputs", "methods"],
    )
    graphed = compile_fx.cudagraphify

    @functools.wraps(count)
    def add_device_info(self: GraphLowering, device: torch.device) -> None:
        if device.type != "offload":
            count(self, device)

    @functools.wraps(prefer_channels_last)
    def find_nodes_prefer_channels_last(self: GraphLowering) -> Any:
        found = prefer_channels_last(self)
        return type(found)(node for node in found if home_of(node) is None)

    @functools.wraps(devices_outside)
    def get_all_devices(graph_module: Any) -> Any:
        found = devices_outside(graph_module)
        home = home_of(list(graph_module.graph.nodes))
        return found if home is None else type(found)([*found, home])

    @functools.wraps(free)
    def codegen_free(self: PythonWrapperCodegen, buffer: Any) -> None:
        name = buffer.get_name()
        if name not in vars(V.graph).get(_OF_OTHERS, ()):
            free(self, buffer)
        elif name not in self.freed:
            self.freed.add(name)
            self.writeline(FreeLine(self, buffer))

    def captures_fetches(scheduler: Scheduler) -> bool:
        known = vars(scheduler)
        if _CAPTURES not in known:
            moving = _moving_inputs()
            known[_CAPTURES] = captures.were_possible() and all(
                moving.isdisjoint(node.used_buffer_names()) if _is_fetch(node) else cuts(scheduler, node) is None
                for node in scheduler.nodes
            )
        return known[_CAPTURES]

    @functools.wraps(cuts)
    def should_partition(self: Scheduler, node: Any) -> str | None:
        if config.triton.cudagraphs and _is_fetch(node):
            return None if captures_fetches(self) else "memory of the cache's"
        return cuts(self, node)

    @functools.wraps(signatures_of)
    def get_graph_partition_signature(self: Scheduler, *args: Any, **kwargs: Any) -> list[Any]:
        found = signatures_of(self, *args, **kwargs)
        for signature in found:
            signature.output_nodes[:] = (node for node in signature.output_nodes if not _is_on_offload(node))
        return found

    @functools.wraps(fold)
    def run_node(self: ConstantFolder, node: Any) -> Any:
        return self.unknown_value if node.target is FETCH else fold(self, node)

    @functools.wraps(constant)
    def get_attr(self: GraphLowering, target: str, args: Any, kwargs: Any) -> Any:
        value = attrgetter(target)(self.module)
        if isinstance(value, torch.Tensor) and value.device.type == "offload":
            return self.add_tensor_constant(value, target)
        return constant(self, target, args, kwargs)

    @functools.wraps(sizes_of)
    def compute_size_for_scheduler_buffer(name_to_buf: dict[str, Any]) -> dict[str, tuple[int, int]]:
        found = sizes_of(name_to_buf)
        return {name: (0, 0) if _is_on_offload(name_to_buf[name].node) else size for name, size in found.items()}

    @functools.wraps(freeable)
    def get_freeable_input_buf(nodes: list[Any], graph_inputs: Any) -> dict[str, Any]:
        found = freeable(nodes, graph_inputs)
        for name, buffer in found.items():
            operand = V.graph.graph_inputs.get(name)
            if operand is not None and _is_on_offload(operand):
                buffer.mpi_buffer.size_free = 0
        return found

    @functools.wraps(reorder)
    def reorder_for_peak_memory(nodes: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        traced = list(V.graph.module.graph.nodes)
        if home_of(traced) is None:
            return reorder(nodes, *args, **kwargs)
        if any(map(_writes_a_part, traced)):
            return nodes
        return arrange(reorder(nodes, *args, **kwargs), set(V.graph.get_output_names()), _is_fetch)

    @functools.wraps(graphed)
    def cudagraphify(*args: Any, **kwargs: Any) -> Any:
        captures.follow()
        return graphed(*args, **kwargs)

    compile_fx.cudagraphify = cudagraphify
    Scheduler.should_partition = should_partition
    Scheduler.get_graph_partition_signature = get_graph_partition_signature
    GraphLowering.add_device_info = add_device_info
    GraphLowering.find_nodes_prefer_channels_last = find_nodes_prefer_channels_last
    post_grad.get_all_devices = get_all_devices
    PythonWrapperCodegen.codegen_free = codegen_free
    ConstantFolder.run_node = run_node
    GraphLowering.get_attr = get_attr
    memory.compute_size_for_scheduler_buffer = compute_size_for_scheduler_buffer
    memory.get_freeable_input_buf = get_freeable_input_buf
    memory.reorder_for_peak_memory = reorder_for_peak_memory


def _never_reuse(name: str) -> None:
    """For the memory of others. Inductor frees nothing that it may not reuse; `codegen_free` does, after the last use."""
    V.graph.never_reuse_buffers.add(name)
    vars(V.graph).setdefault(_OF_OTHERS, set()).add(name)


def _traced() -> torch.Tensor:
    """The operand of the operation that is being lowered, as it was traced."""
    return V.graph.current_node.args[0].meta["val"]


def _call(operation: Any, operands: list[Any], *numbers: int) -> Any:
    """A call that generated code makes, whose result is as it was traced.

    Inductor's `fallback_handler` evaluates the operation again to learn that. In 2.11 its call is a node on the operand's
    device, for which the code of a graph leaves its own device and comes back, with a second node for the result. The C++ that
    2.11 generates knows no other form.
    """
    if V.graph.cpp_wrapper:
        return fallback_handler(operation, add_to_fallback_set=False)(*operands, *numbers)
    operands = [FallbackKernel.realize_input(operand) for operand in operands]
    for operand in operands:
        as_storage_and_layout(operand, freeze=True)
    layout = FallbackKernel.tensor_to_layout(V.graph.current_node.meta["val"])
    call = FallbackKernel(layout, operation, operands, numbers, lambda tensors, others: ([*tensors, *others], {}))
    call.outputs = [call]
    return TensorBox.create(call)


def _lower() -> None:
    @register_lowering(FETCH, type_promotion_kind=None)
    def fetch(self: Any, device: torch.device) -> Any:
        aligned = tensor_is_aligned(_traced())
        result = _call(_CODED_FETCH, [self], *code_of(device), GPU_ALIGN_BYTES if aligned else 1)
        # Where inductor takes it to be as aligned as its operand: of that it knows nothing.
        unaligned = V.graph.unaligned_buffers
        (unaligned.discard if aligned else unaligned.add)(result.get_name())
        _never_reuse(result.get_name())
        return result

    @register_lowering(LOOK_UP, type_promotion_kind=None)
    def look_up(self: Any, index: Any) -> Any:
        result = _call(LOOK_UP, [self, index])
        V.graph.unaligned_buffers.discard(result.get_name())
        return result

    def as_traced(value: Any) -> Any:
        """Inductor chooses the strides of what it computes, and would lay out anew what a Block then has of it."""
        return ExternKernel.require_exact_strides(value, _traced().stride())

    @register_lowering(STASH, type_promotion_kind=None)
    def stash(self: Any, device: torch.device) -> Any:
        return _call(torch.ops.offload.stash.coded, [as_traced(self)], device.index or 0)

    @register_lowering(GIVE, type_promotion_kind=None)
    def give(self: Any, device: torch.device) -> Any:
        value = as_traced(self)
        value.realize()
        _never_reuse(value.get_name())
        return _call(torch.ops.offload.give.coded, [value], device.index or 0)


@functools.cache
def register() -> None:
    """Makes offload a device of inductor's.

    Raises:
        AttributeError: this torch's inductor has no such function to override, or another one.
    """
    _original(
        FallbackKernel,
        "__init__",
        *["self", "layout", "kernel", "tensor_args", "nontensor_args", "unflatten_args", "kwargs", "unbacked_bindings"],
    )
    _override()
    _lower()
    register_backend_for_device(
        "offload", _NoKernels, PythonWrapperCodegen, CppWrapperCpu, device_custom_pass=OnDevice()
    )
