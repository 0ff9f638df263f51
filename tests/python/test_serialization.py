"""Saving, loading, copying and moving: files open without this package, and objects keep their identity."""

import copy
import gc
import io
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import COMPUTE, CPU, OFFLOAD, Tied, assert_same, grads, values
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.LSTM(6, 3))


def written(value, **kwargs):
    buffer = io.BytesIO()
    torch.save(value, buffer, **kwargs)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("new_format", [True, False])
def test_save_and_load(weights_only, new_format):
    net = model().to(OFFLOAD)
    file = written(net.state_dict(), _use_new_zipfile_serialization=new_format)
    loaded = torch.load(file, weights_only=weights_only)
    assert {value.device for value in loaded.values()} == {CPU}
    assert_same(loaded, dict(net.state_dict()))


@pytest.mark.parametrize(
    "location",
    ["offload", "offload:0", torch.device("offload"), lambda s, _: s.to(device="offload"), {"cpu": "offload"}],
    ids=["name", "index", "device", "function", "dict"],
)
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("saved_on", [CPU, OFFLOAD], ids=str)
def test_map_location_to_offload(saved_on, weights_only, location):
    net = model().to(saved_on)
    loaded = torch.load(written(net.state_dict()), map_location=location, weights_only=weights_only)
    assert {value.device.type for value in loaded.values()} == {"offload"}
    assert_same(loaded, dict(net.state_dict()))


@pytest.mark.parametrize("location", ["cpu", COMPUTE, None], ids=str)
def test_map_location_from_offload(location):
    net = model().to(OFFLOAD)
    loaded = torch.load(written(net.state_dict()), map_location=location)
    assert {value.device for value in loaded.values()} == {torch.device(location or "cpu")}
    assert_same(loaded, dict(net.state_dict()))


@pytest.mark.parametrize("location", ["cpu", "offload"])
def test_mmap(tmp_path, location):
    net = model().to(OFFLOAD)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt", mmap=True, map_location=location)
    assert_same(loaded, dict(net.state_dict()))
    assert {value.device.type for value in loaded.values()} == {location}


@pytest.mark.parametrize("assign", [True, False])
def test_mmap_into_a_model(tmp_path, assign):
    net = model().to(OFFLOAD)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    fresh = model().to(OFFLOAD)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(torch.load(tmp_path / "net.pt", mmap=True, map_location="offload"), assign=assign)
    assert_same(dict(fresh.state_dict()), dict(net.state_dict()))


@pytest.mark.parametrize("what", ["state_dict", "tensor", "module", "views"])
def test_opens_without_this_package(tmp_path, what):
    net = model().to(OFFLOAD)
    base = torch.arange(12.0, device=OFFLOAD)
    value = {
        "state_dict": net.state_dict(),
        "tensor": base,
        "module": nn.Linear(3, 2).to(OFFLOAD),
        "views": [base, base[3:], base.view(3, 4).t()],
    }[what]
    torch.save(value, tmp_path / "file.pt")
    program = f"""
import sys, torch
value = torch.load({str(tmp_path / "file.pt")!r}, weights_only={what not in ("module",)})
assert "torch_offload" not in sys.modules
if hasattr(value, "parameters"): value = value.state_dict()
for tensor in ([value] if torch.is_tensor(value) else value.values() if hasattr(value, "values") else value):
    assert tensor.device.type == "cpu", tensor.device
if {what == "views"}:
    assert value[1].data_ptr() == value[0].data_ptr() + 12 and value[2].stride() == (1, 4)
    value[0][3] = 50
    assert value[1][0] == 50
torch.save(value, {str(tmp_path / "back.pt")!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if what == "views":
        base[3] = 50
    assert_same(torch.load(tmp_path / "back.pt"), dict(value.state_dict()) if what == "module" else value)


def test_optimizer_checkpoint():
    net = nn.Linear(4, 3).to(OFFLOAD)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4, device=COMPUTE)).sum().backward()
    optimizer.step()
    loaded = torch.load(written(optimizer.state_dict()))
    fresh = torch.optim.AdamW(net.parameters())
    fresh.load_state_dict(loaded)
    for parameter in net.parameters():
        assert_same(fresh.state[parameter], optimizer.state[parameter])
        assert fresh.state[parameter]["exp_avg"].device == parameter.device


def test_views_stay_views_through_a_file():
    base = torch.arange(12.0, device=OFFLOAD)
    one, two = torch.load(written([base.view(3, 4), base[4:]]), map_location="offload")
    one[1, 0] = 50
    assert two[0].item() == 50
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


def test_deepcopy():
    net = model().to(OFFLOAD)
    net[0](torch.ones(2, 4, device=COMPUTE)).sum().backward()
    other = copy.deepcopy(net)
    assert_same(values(other), values(net))
    assert other[0].weight.grad is None  # as PyTorch has it
    assert_same(copy.deepcopy(net[0].weight.grad), net[0].weight.grad)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert theirs.device == mine.device
        assert theirs.data_ptr() != mine.data_ptr()
    with torch.no_grad():
        other[0].weight.zero_()
    assert net[0].weight.abs().sum() > 0


def test_deepcopy_keeps_ties_and_views():
    net = Tied().to(OFFLOAD)
    other = copy.deepcopy(net)
    assert other.head.weight is other.embedding.weight
    base = torch.arange(6.0, device=OFFLOAD)
    one, two = copy.deepcopy([base, base[2:]])
    one[2] = 9
    assert two[0].item() == 9
    assert base[2].item() == 2


def test_copy_and_clone_of_a_parameter():
    parameter = nn.Parameter(torch.arange(3.0, device=OFFLOAD))
    assert copy.copy(parameter).data_ptr() == parameter.data_ptr()
    assert parameter.clone().data_ptr() != parameter.data_ptr()
    assert_same(copy.deepcopy(parameter), parameter)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize(
    ("mine", "theirs"), [(OFFLOAD, CPU), (CPU, OFFLOAD), (OFFLOAD, OFFLOAD), (OFFLOAD, COMPUTE)], ids=str
)
def test_load_state_dict(mine, theirs, assign):
    source = model()
    with torch.no_grad():
        source[0].weight.add_(1)
    source.to(theirs)
    target = model().to(mine)
    before = {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()}
    target.load_state_dict(source.state_dict(), assign=assign)
    assert_same(values(target), values(source))
    for name, parameter in target.named_parameters():
        assert parameter.device.type == (theirs if assign else mine).type
        if not assign:
            assert before[name] == (id(parameter), parameter.data_ptr())


def test_load_state_dict_into_meta():
    source = model().to(OFFLOAD)
    with torch.device("meta"):
        target = model()
    target.load_state_dict(source.state_dict(), assign=True)
    assert_same(values(target), values(source))
    assert next(target.parameters()).device.type == "offload"
    with torch.device("meta"):
        target = model()
    target.to_empty(device=OFFLOAD).load_state_dict(source.state_dict())
    assert_same(values(target), values(source))


@pytest.mark.parametrize("swap", [False, True])
def test_module_to_keeps_parameter_objects(swap):
    net = Tied()
    before = dict(net.named_parameters())
    expected = {name: parameter.detach().clone() for name, parameter in before.items()}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for device in (OFFLOAD, COMPUTE, OFFLOAD, CPU, OFFLOAD):
            net.to(device)
            assert net.head.weight is net.embedding.weight
            for name, parameter in net.named_parameters():
                assert parameter is before[name]
                assert parameter.device.type == device.type
            assert_same(dict(net.named_parameters()), expected)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_module_methods():
    net = nn.Linear(3, 2)
    weight = net.weight
    assert net.to("offload") is net
    assert net.weight is weight
    assert weight.device == torch.device("offload:0")
    assert net.double().weight.dtype == torch.float64
    assert net.weight.device.type == "offload"
    assert net.cpu().weight.device == CPU
    assert net.weight is weight
    net.to("offload", torch.bfloat16)
    assert (net.weight.dtype, net.weight.device.type) == (torch.bfloat16, "offload")


def test_module_to_moves_gradients_and_the_optimizer_goes_on():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    x = torch.ones(2, 4)
    net(x).sum().backward()
    expected = net.weight.grad.clone()
    net.to(OFFLOAD)
    assert net.weight.grad.device.type == "offload"
    assert_same(net.weight.grad, expected)
    before = net.weight.detach().cpu().clone()
    optimizer.step()
    assert_same(net.weight, nn.Parameter(before - 0.5 * expected))


def test_tied_weights_have_one_memory_and_one_gradient():
    torch.manual_seed(0)
    net = Tied()
    plain = copy.deepcopy(net).to(COMPUTE)
    gc.collect()
    before = torch.offload.memory_allocated()
    net.to(OFFLOAD)
    assert torch.offload.memory_allocated() - before <= 4096
    assert len(list(net.parameters())) == 1
    tokens = torch.tensor([[1, 2, 1]], device=COMPUTE)
    for m in (plain, net):
        m(tokens).square().sum().backward()
    assert_same(grads(net), grads(plain))
    assert sorted(net.state_dict()) == ["embedding.weight", "head.weight"]
    loaded = torch.load(written(net.state_dict()), map_location="offload")
    assert loaded["embedding.weight"].data_ptr() == loaded["head.weight"].data_ptr()


def test_state_dict_holds_the_parameters_memory():
    net = nn.Linear(3, 2).to(OFFLOAD)
    assert net.state_dict()["weight"].data_ptr() == net.weight.data_ptr()
    assert net.state_dict()["weight"].device.type == "offload"


def test_saving_what_was_born_on_the_device():
    value = torch.arange(6.0, device=OFFLOAD) * 2
    assert_same(torch.load(written(value)), torch.arange(6.0) * 2)
    assert_same(copy.deepcopy(value), torch.arange(6.0) * 2)
    assert_same(pickle.loads(pickle.dumps(value)), torch.arange(6.0) * 2)
