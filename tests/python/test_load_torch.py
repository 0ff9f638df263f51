"""torch_offload.load of files of torch.save: what torch.load makes of them, in memory or left in the file."""

import collections
import dataclasses
import json

import pytest
import torch
from helpers import CACHED, COMPUTE, CPU, OFFLOAD, Tied, assert_same, at, data, grads, layers, passes
from safetensors_files import NAMES
from torch import nn
from torch_files import patch, place, records, write_records

import torch_offload

both = pytest.mark.parametrize("mmap", [False, True], ids=["memory", "mmap"])

DTYPES = [*NAMES, torch.complex32, torch.complex128, torch.float4_e2m1fn_x2]


def saved(path, value):
    torch.save(value, path)
    return path


def facts(value, storages):
    """All that makes up a value but where its tensors are; storages by the order in which they come up."""
    if isinstance(value, torch.Tensor):
        base = value.untyped_storage()
        storage = storages.setdefault(base._cdata, len(storages)) if base.nbytes() else "empty"
        return (
            type(value), value.dtype, value.shape, value.stride(), value.storage_offset(), base.nbytes(), storage,
            value.requires_grad, value.is_conj(), value.is_neg(), facts(value.__dict__, storages),
        )  # fmt: skip
    if isinstance(value, dict):
        inner = [(facts(key, storages), facts(item, storages)) for key, item in value.items()]
        return (type(value), inner, [facts(item, storages) for item in getattr(value, "__dict__", {}).items()])
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return (type(value), [facts(item, storages) for item in value])
    return (type(value), value)


def assert_loaded(path, mmap):
    """The same as torch.load makes: structure, storages, and bits."""
    expected = torch.load(path, weights_only=True)
    loaded = torch_offload.load(path, mmap=mmap)
    assert facts(loaded, {}) == facts(expected, {})
    assert_same(loaded, expected)
    return loaded


def base():
    return torch.arange(24.0)


def with_attribute():
    tensor = torch.ones(3)
    tensor.note = {"x": [1, torch.zeros(2)]}
    return tensor


def parameter_with_attribute():
    parameter = nn.Parameter(torch.ones(3))
    parameter.note = "kept"
    return parameter


def shared():
    x, parameter = base(), nn.Parameter(torch.ones(2))
    return [x, x[3:], x.view(4, 6).t(), x.as_strided((3, 3), (1, 1), 2), x, parameter, parameter]


def nested():
    inner = [1, "a", None, 2.5, True, b"bytes", 1 << 80, (torch.ones(1), {"deep": torch.zeros(2)})]
    return collections.OrderedDict(
        z=inner,
        a={3: torch.tensor(4), (1, 2): 5},
        c=collections.Counter("aab"),
        s={1, 2},
        d=torch.float16,
        shape=torch.Size([3]),
        device=torch.device("cpu"),
        empty={},
    )


def itself():
    value = {"x": torch.ones(2)}
    value["again"] = [value["x"]]
    return value


VALUES = {
    "state dict": lambda: layers().state_dict(),
    "tensor": lambda: at(CPU, 3, 5),
    "list": lambda: [at(CPU, 3), at(CPU, 2, 2)],
    "no tensors": lambda: {"a": [1, 2]},
    "nothing": lambda: None,
    "nested": nested,
    "itself": itself,
    "views and ties": shared,
    "expanded": lambda: torch.ones(3, 1).expand(3, 1000),
    "channels last": lambda: at(CPU, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part": lambda: at(CPU, 1000)[500:510],
    "requires a gradient": lambda: [
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    "scalar": lambda: torch.tensor(1.5),
    "without elements": lambda: [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int8), base()[5:5]],
    "conjugate": lambda: [at(CPU, 3, dtype=torch.complex64).conj(), at(CPU, 2, 3, dtype=torch.complex128).mH],
    "negative": lambda: torch._neg_view(at(CPU, 3)),
    "conjugate's imaginary part": lambda: at(CPU, 3, dtype=torch.complex64).conj().imag,
    "tensor with an attribute": with_attribute,
    "parameter with an attribute": parameter_with_attribute,
    "parameters": lambda: nn.ParameterList([torch.ones(2), torch.zeros(3)]).state_dict(),
    "large": lambda: at(CPU, 1 << 20),
}


@both
@pytest.mark.parametrize("case", VALUES)
def test_as_torch_load_makes_it(tmp_path, mmap, case):
    assert_loaded(saved(tmp_path / "x.pt", VALUES[case]()), mmap)


@both
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(tmp_path, mmap, aligned):
    expected = {}
    for dtype in DTYPES:
        whole = torch.randint(0, 2 if dtype == torch.bool else 256, (15 * dtype.itemsize,), dtype=torch.uint8)
        expected[str(dtype)] = whole.view(dtype).reshape(3, 5)
    path = saved(tmp_path / "x.pt", expected)
    if not aligned:
        write_records(path, records(path))
    loaded = torch_offload.load(path, mmap=mmap)
    assert {value.device for value in loaded.values()} == {torch.device("offload", 0)}
    assert {name: value.dtype for name, value in loaded.items()} == {str(dtype): dtype for dtype in DTYPES}
    for name, value in loaded.items():
        assert value.cpu().view(torch.uint8).equal(expected[name].view(torch.uint8)), name


@both
@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt", "x"])
def test_names(tmp_path, mmap, name):
    assert_loaded(saved(tmp_path / name, {"a": at(CPU, 3)}), mmap)
    if name != "x":
        assert_same(torch_offload.load(tmp_path, mmap=mmap), {"a": at(CPU, 3)})


@both
@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("crc", [True, False])
def test_settings_of_torch_save(tmp_path, mmap, alignment, crc, monkeypatch):
    monkeypatch.setattr("torch.utils.serialization.config.save.storage_alignment", alignment)
    monkeypatch.setattr("torch.utils.serialization.config.save.compute_crc32", crc)
    assert_loaded(saved(tmp_path / "x.pt", shared()), mmap)


def file_bytes():
    return torch_offload.memory_stats()["host.file_bytes.current"]


def test_what_is_left_in_the_file(tmp_path):
    value = shared()
    path = saved(tmp_path / "x.pt", value)
    before, host = file_bytes(), torch_offload.memory_stats()["host.allocated_bytes.current"]
    loaded = torch_offload.load(path, mmap=True)
    assert file_bytes() - before == 24 * 4 + 2 * 4  # each storage once
    assert torch_offload.memory_stats()["host.allocated_bytes.current"] == host
    del loaded
    assert file_bytes() == before


def test_misaligned_storages_are_read_into_memory(tmp_path):
    path = saved(tmp_path / "x.pt", {f"{k}": at(CPU, 7, seed=k) for k in range(5)})
    contents = records(path)
    write_records(path, contents)
    aligned = sum(len(value) for name, value in contents.items() if name[:5] == "data/" and place(path, name) % 16 == 0)
    assert aligned < 5 * 28
    before = file_bytes()
    loaded = assert_loaded(path, True)
    assert file_bytes() - before == aligned
    del loaded


@both
def test_writes_are_seen_by_every_tensor_of_a_storage(tmp_path, mmap):
    path = saved(tmp_path / "x.pt", shared())
    before = path.read_bytes()
    expected = torch.load(path)
    loaded = torch_offload.load(path, mmap=mmap)
    for tensors in (loaded, expected):
        tensors[1][2:5] = 50
        tensors[2][0, 3].add_(7)
        with torch.no_grad():
            tensors[5].mul_(3)
    assert loaded[5] is loaded[6]
    assert_same(loaded, expected)
    assert_same([value.to(COMPUTE) for value in loaded], expected)
    assert path.read_bytes() == before


def train(model, optimizer, tokens):
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, {name: value.clone() for name, value in grads(model).items()}, dict(model.state_dict())


def test_a_checkpoint_goes_on_from_the_file(tmp_path):
    torch.manual_seed(0)
    tokens = torch.arange(12, device=COMPUTE).reshape(3, 4)
    model = Tied(50, 8).to("offload")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, tokens)
    path = saved(tmp_path / "x.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})
    before = path.read_bytes()
    results = []
    for mmap in (False, True):
        checkpoint = torch_offload.load(path, mmap=mmap)
        again = Tied(50, 8).to("offload")
        again.load_state_dict(checkpoint["model"], assign=True)
        again.head.weight = again.embedding.weight
        state = checkpoint["model"]
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        resumed = torch.optim.AdamW(again.parameters(), lr=0.1)
        resumed.load_state_dict(checkpoint["optimizer"])
        assert checkpoint["epoch"] == 3
        if mmap:
            path.unlink()
        results.append(train(again, resumed, tokens))
        if mmap:
            path.write_bytes(before)
    assert_same(results[1], results[0])
    assert_same(results[0], train(model, optimizer, tokens))
    assert path.read_bytes() == before


def test_a_file_of_more_than_four_gigabytes(tmp_path):
    path = tmp_path / "x.pt"
    last = torch.arange(5.0)
    try:
        with torch.serialization.skip_data():
            torch.save({"big": torch.empty(5 << 30, dtype=torch.uint8), "last": torch.empty(5)}, path)
        if path.stat().st_blocks * 512 > 1 << 20:
            pytest.skip("the file system writes what nobody wrote")
        patch(path, place(path, "data/1"), last.numpy().tobytes())
        patch(path, place(path, "data/0") + (9 << 29), b"\7")
        loaded = torch_offload.load(path, mmap=True)
        assert_same(loaded["last"], last)
        assert loaded["big"].shape == (5 << 30,)
        assert loaded["big"][9 << 29] == 7
        assert_same(loaded["last"].to(COMPUTE) + 1, last + 1)
    finally:
        path.unlink()


@both
def test_several_batches(tmp_path, mmap, monkeypatch):
    monkeypatch.setattr("torch_offload.io.load._BATCH_BYTES", 3 << 20)
    assert_loaded(saved(tmp_path / "x.pt", [at(CPU, 1 << 18, seed=k) for k in range(9)] + [at(CPU, 1 << 20)]), mmap)


@dataclasses.dataclass
class Config:
    width: int
    tensor: torch.Tensor


@both
def test_classes_that_are_declared_safe(tmp_path, mmap):
    path = saved(tmp_path / "x.pt", {"config": Config(3, torch.ones(2))})
    with torch.serialization.safe_globals([Config]):
        config = torch_offload.load(path, mmap=mmap)["config"]
    assert (type(config), config.width, config.tensor.device.type) == (Config, 3, "offload")
    assert_same(config.tensor, torch.ones(2))


@both
def test_what_was_on_other_devices(tmp_path, mmap):
    value = [torch.ones(2, device=OFFLOAD), torch.ones(3, device=COMPUTE), torch.ones(4, device="meta")]
    loaded = torch_offload.load(saved(tmp_path / "x.pt", value), mmap=mmap)
    assert [tensor.device.type for tensor in loaded] == ["offload", "offload", "meta"]
    assert_same(loaded[:2], value[:2])


@both
def test_under_a_default_device(tmp_path, mmap):
    path = saved(tmp_path / "x.pt", shared())
    with torch.device("meta"):
        loaded = torch_offload.load(path, mmap=mmap)
    assert_same(loaded, torch.load(path))


def shards(folder):
    first, second = {"a": at(CPU, 3, seed=1), "b": at(CPU, 4, seed=2)}, {"c": at(CPU, 5, seed=3), "z": at(CPU, 1)}
    first["tied"] = first["a"]
    torch.save(first, folder / "pytorch_model-1-of-2.bin")
    torch.save(collections.OrderedDict(second), folder / "pytorch_model-2-of-2.bin")
    places = {"c": 2, "a": 1, "b": 1, "tied": 1}
    names = {name: f"pytorch_model-{number}-of-2.bin" for name, number in places.items()}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": names}))
    return index, {**first, **second}


@both
@pytest.mark.parametrize("by", ["index", "directory"])
def test_shards(tmp_path, mmap, by):
    index, expected = shards(tmp_path)
    loaded = torch_offload.load(index if by == "index" else tmp_path, mmap=mmap)
    assert list(loaded) == ["c", "a", "b", "tied", "z"]
    assert_same(loaded, expected)
    assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()


@pytest.mark.parametrize(
    "value", [[torch.ones(2)], torch.ones(2), {"other": torch.ones(2)}], ids=["list", "tensor", "dict"]
)
def test_shards_that_are_no_dict_of_what_the_index_says(tmp_path, value):
    index, _ = shards(tmp_path)
    torch.save(value, tmp_path / "pytorch_model-2-of-2.bin")
    sentence = (
        r"tensor 'c' is in pytorch_model-2-of-2.bin, which has 1 others"
        if isinstance(value, dict)
        else r"pytorch_model-2-of-2.bin, which .*index.json names, holds no dict of tensors by their names\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        torch_offload.load(index)


def test_a_directory_of_a_model_and_its_trainer(tmp_path):
    expected = {"a": at(CPU, 3)}
    saved(tmp_path / "pytorch_model.bin", expected)
    saved(tmp_path / "training_args.bin", {})
    assert_same(torch_offload.load(tmp_path), expected)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"holds 2 files \*.bin \(model.bin, training_args.bin\); name the one"):
        torch_offload.load(tmp_path)


def test_the_bar(tmp_path, capsys):
    path = saved(tmp_path / "x.pt", {"a": at(CPU, 1000)})
    torch_offload.load(path, progress=True, mmap=True)
    torch_offload.load(path)
    assert capsys.readouterr().err == ""
    torch_offload.load(path, progress=True)
    assert "load: " in capsys.readouterr().err


@pytest.mark.skipif(not CACHED, reason="reads host bytes in place")
def test_left_in_the_file_it_is_fetched_without_memory_on_the_host(tmp_path):
    path = saved(tmp_path / "x.pt", {f"w{k}": torch.full((1 << 18,), float(k)) for k in range(8)})
    program = f"""
        import torch, torch_offload
        tensors = torch_offload.load({str(path)!r}, mmap=True)
        assert torch_offload.memory_stats()["host.file_bytes.current"] == 8 << 20
        x = torch.ones(1, device=torch_offload._C.paired_device(0))
        for _ in range(2):
            assert all((x * tensor)[-1].item() == k for k, tensor in enumerate(tensors.values()))
            torch_offload.empty_cache()
        assert torch_offload.memory_stats()["host.allocated_bytes.peak"] == 0
    """
    passes(program)


def test_inference_from_a_file(tmp_path):
    net = layers()
    path = saved(tmp_path / "x.pt", net.state_dict())
    with torch.device("meta"):
        model = layers()
    model.load_state_dict(torch_offload.load(path, mmap=True), assign=True)
    assert_same(model(data(3, 8)), net.to(COMPUTE)(data(3, 8)))
