"""What the offload device does not hold is refused in one sentence each: compressed, nested, quantised, page-locked memory."""

import ctypes

import numpy
import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, CPU, OFFLOAD, assert_same, data, same, says
from torch import nn

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
NAMES = {
    torch.sparse_csr: "SparseCsr",
    torch.sparse_csc: "SparseCsc",
    torch.sparse_bsr: "SparseBsr",
    torch.sparse_bsc: "SparseBsc",
}


def sparse(tensor, layout):
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return tensor.to_sparse(layout=layout, blocksize=blocks)


def tensor_of(layout, shape=(4, 4)):
    return (
        f"offload: a tensor of shape {list(shape)} and layout {NAMES[layout]} can't live on the offload device; "
        "offload tensors are dense, or sparse in COO form: make it one with .to_dense() or .to_sparse(), or keep it on the "
        "CPU or on CUDA."
    )


def tensors_of(name):
    return (
        f"offload: tensors of layout {name} can't live on the offload device; make a dense one, or keep it on the CPU."
    )


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", NAMES, ids=NAMES.values())
@pytest.mark.parametrize(
    "make",
    [
        lambda layout: sparse(torch.eye(4), layout).to(OFFLOAD),
        lambda layout: sparse(torch.eye(4, device=OFFLOAD), layout),
        lambda layout: torch.ones(4, 4, device=OFFLOAD).copy_(sparse(torch.eye(4), layout)),
        lambda layout: sparse(torch.eye(4), layout).copy_(torch.ones(4, 4, device=OFFLOAD)),
        lambda layout: nn.ParameterList([nn.Parameter(sparse(torch.eye(4), layout))]).to(OFFLOAD),
    ],
    ids=["to", "to_sparse", "copy_", "copy_ from offload", "module"],
)
def test_a_compressed_tensor(make, layout):
    says(RuntimeError, tensor_of(layout), lambda: make(layout))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", NAMES, ids=NAMES.values())
def test_an_empty_compressed_tensor(layout):
    says(RuntimeError, tensors_of(NAMES[layout]), lambda: torch.empty(4, 4, layout=layout, device=OFFLOAD))


@pytest.mark.parametrize("layout", ["jagged"])
def test_other_layouts(layout):
    says(RuntimeError, tensors_of("Jagged"), lambda: torch.empty(4, 4, layout=getattr(torch, layout), device=OFFLOAD))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_compressed_tensor_of_parts():
    refused = tensors_of("SparseCsr")
    says(RuntimeError, refused, lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), device=OFFLOAD))
    parts = [torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1)]
    says(RuntimeError, refused, lambda: torch.sparse_csr_tensor(*(part.to(OFFLOAD) for part in parts), (1, 1)))
    says(RuntimeError, refused, lambda: torch.zeros(2, 2, layout=torch.sparse_csr, device=OFFLOAD))


@pytest.mark.parametrize("inference", [False, True])
def test_a_sparse_tensor_beside_offload(inference):
    with torch.inference_mode(inference):
        expected = torch.eye(4).to_sparse() @ data(4, 4, device=CPU)
        assert_same(torch.eye(4).to_sparse() @ data(4, 4, device=OFFLOAD), expected)


NESTED = (
    "offload: a nested tensor of 2 tensors can't live on the offload device; keep it on the CPU or on CUDA, make one "
    "of layout torch.jagged, or pad it."
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(OFFLOAD),
        lambda: repr(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=OFFLOAD)),
        lambda: torch.nested.as_nested_tensor([torch.ones(2, device=OFFLOAD), torch.ones(3, device=OFFLOAD)]),
        lambda: torch.ones(3, device=OFFLOAD).copy_(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ],
)
def test_nested_tensors(make):
    says(RuntimeError, NESTED, make)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "operation",
    [
        F.linear,
        lambda nested, w: F.layer_norm(nested, (3,), w[0], w[1]),
        lambda nested, w: nested * w.sum(),
    ],
    ids=["linear", "layer_norm", "mul"],
)
def test_nested_tensors_elsewhere_beside_offload(operation):
    def run(device):
        nested = torch.nested.nested_tensor([data(2, 3), data(4, 3, seed=1)])
        return operation(nested, data(5, 3, device=device, seed=2)).to_padded_tensor(0.0)

    same(run)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_gradients():
    nested = torch.nested.nested_tensor([data(2, 3), data(4, 3, seed=1)])
    weight = data(5, 3, device=OFFLOAD).requires_grad_()
    sentence = (
        "offload: aten::linear of a nested tensor and offload tensors has no gradient; call it under torch.no_grad(), make "
        "the nested tensor one of layout torch.jagged and of offload tensors, or pad it."
    )
    says(RuntimeError, sentence, lambda: F.linear(nested, weight))


def test_jagged_tensors():
    def run(device):
        parts = [data(2, 3, device=device), data(3, 3, device=device, seed=1)]
        nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        weight = data(4, 3, device=device).requires_grad_()
        values = F.linear(nested, weight).values()
        assert nested.device.type == values.device.type == device.type
        values.square().sum().backward()
        return values, weight.grad

    assert_same(run(OFFLOAD), run(COMPUTE))


def quantised_type(name):
    return (
        f"offload: a tensor of PyTorch's own quantised dtype {name} can't live on the offload device; dequantize() it "
        "first, keep it on the CPU, or quantise to integer tensors with scales, as torchao does."
    )


@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).to(OFFLOAD),
        lambda: torch.quantize_per_tensor(torch.ones(3, device=OFFLOAD), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_tensor_dynamic(torch.ones(3, device=OFFLOAD), torch.qint8, False),
        lambda: torch._empty_affine_quantized((3,), scale=1.0, zero_point=0, dtype=torch.qint8, device=OFFLOAD),
        lambda: torch.empty(3, dtype=torch.qint8, device=OFFLOAD),
        lambda: torch.ones(3, device=OFFLOAD).copy_(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
    ],
)
def test_quantised_tensors(make):
    says(RuntimeError, quantised_type("QInt8"), make)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_mkldnn_tensors():
    refused = (
        "offload: a tensor of shape [3, 3] and layout Mkldnn can't live on the offload device; offload tensors are "
        "dense, or sparse in COO form: make it one with .to_dense() or .to_sparse(), or keep it on the CPU or on CUDA."
    )
    says(RuntimeError, refused, lambda: torch.ones(3, 3, device=OFFLOAD).to_mkldnn())
    pytorchs = "Unsupported device type for mkldnn layout: offload"
    says(NotImplementedError, pytorchs, lambda: torch.ones(3, 3).to_mkldnn().to(OFFLOAD))


PINNED = "offload: memory of the offload device is page-locked already where it can be; leave pin_memory out."


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, device=OFFLOAD, pin_memory=True),
        lambda: torch.zeros(3, device=OFFLOAD, pin_memory=True),
        lambda: torch.arange(3, device=OFFLOAD, pin_memory=True),
        lambda: torch.ones(3, device=OFFLOAD).new_empty(3, pin_memory=True),
        lambda: torch.ones_like(torch.ones(3, device=OFFLOAD), pin_memory=True),
        lambda: torch.kaiser_window(3, device=OFFLOAD, pin_memory=True),
        lambda: torch.ones(3, device=OFFLOAD).pin_memory(),
    ],
)
def test_pin_memory(make):
    says(RuntimeError, PINNED, make)


def test_is_pinned_answers():
    assert isinstance(torch.ones(3, device=OFFLOAD).is_pinned(), bool)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, memory is page-locked for it")
def test_pin_memory_for_no_gpu():
    refused = "offload: there is no GPU that memory could be page-locked for; leave pin_memory out."
    with pytest.warns(DeprecationWarning, match="device"):
        says(RuntimeError, refused, lambda: torch.ones(3).pin_memory("offload"))


@pytest.mark.parametrize(
    "read", [torch.Tensor.numpy, numpy.asarray, numpy.array, numpy.sin], ids=["numpy", "asarray", "array", "sin"]
)
def test_numpy_of_an_offload_tensor(read):
    says(
        TypeError,
        "can't convert offload:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.",
        lambda: read(torch.ones(3, device=OFFLOAD)),
    )
    assert torch.ones(3, device=OFFLOAD).numpy(force=True).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "read",
    [
        torch.from_dlpack,
        torch.Tensor.__dlpack__,
        torch.Tensor.__dlpack_device__,
        torch.utils.dlpack.to_dlpack,
        numpy.from_dlpack,
    ],
    ids=["torch", "capsule", "device", "function", "numpy"],
)
def test_dlpack_of_an_offload_tensor(read):
    refused = (
        "offload: a tensor of shape [3] on offload:0 can't be handed over through DLPack, which has no such device; "
        "hand over a copy, tensor.cpu()."
    )
    says(BufferError, refused, lambda: read(torch.ones(3, device=OFFLOAD)))
    assert torch.from_dlpack(torch.ones(3, device=OFFLOAD).cpu()).tolist() == [1, 1, 1]


class Viewed(ctypes.Structure):
    """What DLPack's C functions fill in; the rest is PyTorch's to know."""

    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("rest", ctypes.c_char * 128)]


@pytest.mark.parametrize("entry", [3, 5], ids=["managed", "view"])
def test_dlpack_by_its_table_of_c_functions(entry):
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = get(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    function = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[entry]
    export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(function)
    out = Viewed()
    refused = (
        "offload: a tensor of shape [3] on offload:0 can't be handed over through DLPack, which has no such device; "
        "hand over a copy, tensor.cpu()."
    )
    says(BufferError, refused, lambda: export(torch.ones(3, device=OFFLOAD), ctypes.addressof(out)))
    assert out.data is None
    plain = torch.ones(3)
    assert export(plain, ctypes.addressof(out)) == 0
    if entry == 5:
        assert out.data == plain.data_ptr()
    else:
        assert out.data is not None


META = torch.device("meta")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda t, m: t + m, "Tensor on device meta is not on the expected device offload:0!"),
        (lambda t, m: m + t, "Tensor on device offload:0 is not on the expected device meta!"),
        (lambda t, m: torch.cat([t, m]), "Tensor on device meta is not on the expected device offload:0!"),
        (lambda t, m: t.copy_(m), "Cannot copy out of meta tensor; no data!"),
        (lambda t, m: m.to(OFFLOAD), "Cannot copy out of meta tensor; no data!"),
    ],
)
def test_meta_tensors_beside_offload(function, sentence):
    """PyTorch's own check: a meta tensor's kernel comes before any of ours."""
    offload, meta = torch.ones(2, 2, device=OFFLOAD), torch.ones(2, 2, device=META)
    says((RuntimeError, NotImplementedError), sentence, lambda: function(offload, meta))
