"""``pickle`` and ``copy``: what comes back is on offload, and is otherwise what a CPU tensor's copy is."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from helpers import COMPUTE, CPU, OFFLOAD, Tied, assert_same, at, passes, values
from torch import nn


def by_multiprocessing(value):
    return pickle.loads(ForkingPickler.dumps(value))


COPIES = {
    "pickle 2": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "pickle 5": lambda value: pickle.loads(pickle.dumps(value, protocol=5)),
    "multiprocessing": by_multiprocessing,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
copies = pytest.mark.parametrize("name", COPIES)


def marked(tensor):
    tensor.note = {"a": 1}
    return tensor


TENSORS = {
    "contiguous": lambda device: at(device, 3, 4),
    "transposed": lambda device: at(device, 3, 4).t(),
    "slice": lambda device: at(device, 5, 4)[1:4, ::2],
    "expanded": lambda device: at(device, 3, 1).expand(3, 4),
    "zero-dimensional": lambda device: at(device, 3)[1],
    "empty": lambda device: torch.empty(0, 3, device=device),
    "bfloat16": lambda device: at(device, 7, dtype=torch.bfloat16),
    "bool": lambda device: at(device, 7) > 0,
    "complex": lambda device: at(device, 4, dtype=torch.complex64).conj(),
    "requires a gradient": lambda device: at(device, 3).requires_grad_(),
    "attribute": lambda device: marked(at(device, 3)),
    "parameter": lambda device: nn.Parameter(at(device, 3)),
    "frozen parameter": lambda device: nn.Parameter(at(device, 3), requires_grad=False),
    "buffer": lambda device: nn.Buffer(at(device, 3)),
}


def what_it_is(value):
    """All but its device and its numbers."""
    note = getattr(value, "note", None)
    return (
        type(value),
        value.requires_grad,
        value.stride(),
        value.storage_offset(),
        value.is_conj(),
        value.is_leaf,
        note,
    )


@copies
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors(kind, name):
    plain = COPIES[name](TENSORS[kind](CPU))
    value = TENSORS[kind](OFFLOAD)
    back = COPIES[name](value)
    assert back is not value
    assert back.device == torch.device("offload:0")
    assert what_it_is(back) == what_it_is(plain)
    assert_same(back, plain)
    if value.numel() > 0 and name != "multiprocessing":  # where what comes back to its process is what was sent
        assert (back.data_ptr() == value.data_ptr()) == (name == "copy")


@copies
def test_views_of_a_storage(name):
    """They share one again where those of the CPU do: all but pickle keep it."""
    shared = []
    for device in (CPU, OFFLOAD):
        base = at(device, 6)
        one, two = COPIES[name]([base, base[2:]])
        one[2] = 9
        shared.append(two[0].item() == 9)
    assert shared == [not name.startswith("pickle")] * 2


@pytest.mark.parametrize("name", ["pickle 2", "pickle 5", "deepcopy"])
def test_a_module_and_its_optimizer(name):
    """Ties, buffers and the optimizer's state come back, and training goes on with the same bits."""
    torch.manual_seed(0)
    net = Tied(norm=True).to(OFFLOAD)
    optimizer = torch.optim.AdamW(net.parameters())
    tokens = torch.tensor([1, 5, 2, 1], device=COMPUTE)

    def step(net, optimizer):
        optimizer.zero_grad()
        net(tokens).square().sum().backward()
        optimizer.step()

    step(net, optimizer)
    other, its = COPIES[name]([net, optimizer])
    assert other.head.weight is other.embedding.weight
    assert {value.device.type for value in values(other).values()} == {"offload"}
    assert {p for group in its.param_groups for p in group["params"]} == set(other.parameters())
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert_same(its.state[theirs], optimizer.state[mine])
        assert {key: value.device for key, value in its.state[theirs].items()} == {
            key: value.device for key, value in optimizer.state[mine].items()
        }
    before = {name: value.clone() for name, value in values(net).items()}
    step(other, its)
    assert_same(values(net), before)
    step(net, optimizer)
    assert_same(values(other), values(net))


def test_purposes():
    """A module that comes back holds parameters."""
    data = pickle.dumps(nn.Linear(100, 100).to(OFFLOAD))
    before = torch.offload.memory_stats()["host.parameter_bytes.current"]
    net = pickle.loads(data)
    assert torch.offload.memory_stats()["host.parameter_bytes.current"] - before == sum(
        p.nbytes for p in net.parameters()
    )


def test_storages():
    storage = at(OFFLOAD, 6)._typed_storage()
    back = pickle.loads(pickle.dumps(storage))
    assert back._untyped_storage.device == torch.device("offload:0")
    assert_same(torch.empty(0, device=OFFLOAD).set_(back), at(CPU, 6))


def test_dtypes_whose_storages_are_untyped():
    """PyTorch can't read back a pickle of such a CPU tensor."""
    value = at(OFFLOAD, 6).to(torch.float8_e4m3fn)
    back = pickle.loads(pickle.dumps(value))
    assert back.device == torch.device("offload:0")
    assert_same(back, value)


def test_devices():
    for device in (torch.device("offload"), torch.device("offload", 0)):
        assert pickle.loads(pickle.dumps(device)) == device


def test_a_process_that_has_not_imported_the_package(tmp_path):
    """What a pickle holds imports it; on another machine it asks for a device that is there."""
    path = tmp_path / "value.pickle"
    path.write_bytes(pickle.dumps({"weight": at(OFFLOAD, 3, 4).t()}))
    out = passes(
        f"""
        import pickle, torch
        value = pickle.load(open({str(path)!r}, "rb"))["weight"]
        print(value.device, value.stride(), value.sum(dtype=torch.float64).item())
        """
    )
    assert out.split() == ["offload:0", "(1,", "4)", str(at(CPU, 3, 4).sum(dtype=torch.float64).item())]


def test_a_device_that_is_not_there():
    data = pickle.dumps(at(OFFLOAD, 3), protocol=2)
    assert data.count(b"offload:0") == 1
    with pytest.raises((RuntimeError, ValueError), match="no device offload:7"):
        pickle.loads(data.replace(b"offload:0", b"offload:7"))


@pytest.mark.parametrize("new_format", [True, False])
def test_files_of_torch_save_know_nothing_of_it(new_format):
    """They name the CPU, whatever they hold, also when they are written within a pickle."""

    class Within:
        def __reduce__(self):
            file = io.BytesIO()
            torch.save(value, file, _use_new_zipfile_serialization=new_format)
            files.append(file.getvalue())
            return dict, ()

    files = []
    value = [at(OFFLOAD, 3), nn.Parameter(at(OFFLOAD, 3)), nn.Linear(2, 2).to(OFFLOAD)]
    pickle.dumps([at(OFFLOAD, 3), Within(), at(OFFLOAD, 3)])
    assert b"offload" not in files[0]
    tensor, parameter, module = torch.load(io.BytesIO(files[0]), weights_only=False)
    assert {tensor.device, parameter.device, module.weight.device} == {CPU}
