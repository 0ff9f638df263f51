"""torch_offload.load: every tensor of a file, of shards, of a directory, in memory or left in the file."""

import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from helpers import CACHED, COMPUTE, CPU, assert_same, at, data, layers, passes
from safetensors_files import NAMES, raw, write, write_bytes

import torch_offload

both = pytest.mark.parametrize("mmap", [False, True], ids=["memory", "mmap"])


def every_dtype():
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    # Elements of one byte before wider ones: then the file is misaligned from the second on.
    for dtype in sorted(NAMES, key=lambda dtype: dtype.itemsize):
        count = 3 * 5 * dtype.itemsize
        whole = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
        tensors[NAMES[dtype]] = whole.view(dtype).reshape(3, 5)
    return tensors


def as_bytes(tensors):
    return {
        name: (value.dtype, value.shape, value.cpu().contiguous().view(torch.uint8).tolist())
        for name, value in tensors.items()
    }


@both
@pytest.mark.parametrize("pad", range(8))
def test_every_dtype_at_every_alignment(tmp_path, mmap, pad):
    tensors = every_dtype()
    loaded = torch_offload.load(write(tmp_path / "x.safetensors", tensors, pad), mmap=mmap)
    assert list(loaded) == list(tensors)
    assert {value.device for value in loaded.values()} == {torch.device("offload", 0)}
    assert as_bytes(loaded) == as_bytes(tensors)


@both
def test_packed_fours(tmp_path, mmap):
    header = {"a": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}}
    loaded = torch_offload.load(write_bytes(tmp_path / "x.safetensors", header, bytes(range(6))), mmap=mmap)["a"]
    assert (loaded.dtype, tuple(loaded.shape)) == (torch.float4_e2m1fn_x2, (2, 3))
    assert loaded.view(torch.uint8).cpu().flatten().tolist() == list(range(6))


@both
def test_every_shape(tmp_path, mmap):
    tensors = {
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "one": at(CPU, 1),
        "deep": at(CPU, 2, 1, 3, 1, 2),
        "no": torch.empty(0),
    }
    loaded = torch_offload.load(write(tmp_path / "x.safetensors", tensors), mmap=mmap)
    assert_same(loaded, tensors)
    assert all(value.is_contiguous() and not value.requires_grad and not value._is_view() for value in loaded.values())


@both
def test_a_file_without_tensors(tmp_path, mmap):
    assert torch_offload.load(write_bytes(tmp_path / "x.safetensors", {}), mmap=mmap) == {}


@both
def test_large_tensors_are_whole(tmp_path, mmap, monkeypatch):
    # More than a batch, a piece of a read, and a chunk of a copy.
    monkeypatch.setattr("torch_offload.io.load._BATCH_BYTES", 5 << 20)
    tensors = {name: torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32) for name, count in
               {"a": (3 << 20) + 7, "b": 10, "c": 1 << 20, "d": (2 << 20) - 1}.items()}  # fmt: skip
    loaded = torch_offload.load(write(tmp_path / "x.safetensors", tensors), mmap=mmap)
    assert_same({name: value + 0 for name, value in loaded.items()}, tensors)


@both
def test_as_the_package_of_the_format_writes_and_reads(tmp_path, mmap):
    safetensors = pytest.importorskip("safetensors.torch")
    # Not all of its versions know the dtypes of AMD's.
    tensors = {name: value for name, value in every_dtype().items() if not name.endswith("FNUZ")}
    path = tmp_path / "x.safetensors"
    safetensors.save_file(tensors, path, metadata={"format": "pt"})
    assert as_bytes(torch_offload.load(path, mmap=mmap)) == as_bytes(safetensors.load_file(path))
    ours = write(tmp_path / "y.safetensors", tensors)
    assert as_bytes(safetensors.load_file(ours)) == as_bytes(tensors)


def shards(folder):
    first, second = {"a": at(CPU, 3, seed=1), "b": at(CPU, 4, seed=2)}, {"c": at(CPU, 5, seed=3), "z": at(CPU, 1)}
    write(folder / "m-1.safetensors", first)
    write(folder / "m-2.safetensors", second)
    names = {"c": "m-2.safetensors", "a": "m-1.safetensors", "b": "m-1.safetensors"}
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": names}))
    return index, {"c": second["c"], **first, "z": second["z"]}


@both
@pytest.mark.parametrize("by", ["index", "directory"])
def test_shards(tmp_path, mmap, by):
    index, expected = shards(tmp_path)
    loaded = torch_offload.load(index if by == "index" else str(tmp_path), mmap=mmap)
    # What the index does not name comes after what it does.
    assert list(loaded) == ["c", "a", "b", "z"]
    assert_same(loaded, expected)


@both
def test_more_shards_than_a_process_may_open_at_first(tmp_path, mmap):
    count = 150
    names = {f"t{k}": f"m-{k}.safetensors" for k in range(count)}
    for k, (name, file) in enumerate(names.items()):
        write(tmp_path / file, {name: torch.full((5,), float(k))})
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    loaded = passes(
        f"""
        import resource, torch, torch_offload
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        loaded = torch_offload.load({str(tmp_path)!r}, mmap={mmap})
        print(all(torch.equal(loaded[f"t{{k}}"].cpu(), torch.full((5,), float(k))) for k in range({count})), len(loaded))
        """
    )
    assert loaded.split() == ["True", str(count)]


@both
def test_a_tensor_in_two_shards_is_the_one_that_the_index_says(tmp_path, mmap):
    index, expected = shards(tmp_path)
    write(tmp_path / "m-1.safetensors", {**{name: expected[name] for name in "ab"}, "c": at(CPU, 5, seed=9)})
    assert_same(torch_offload.load(index, mmap=mmap), expected)
    write(tmp_path / "m-1.safetensors", {name: expected[name] for name in "abz"})
    with pytest.raises(ValueError, match=r"index\.json does not name tensor 'z', which 2 of its files have\."):
        torch_offload.load(index, mmap=mmap)


@both
@pytest.mark.parametrize("length", [0x280, 0x10280])
def test_a_header_whose_length_looks_like_a_pickle(tmp_path, mmap, length):
    tensors = {"a": at(CPU, 3)}
    entry = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})
    path = write_bytes(tmp_path / "x", entry.ljust(length), raw(tensors["a"]))
    assert path.read_bytes().startswith(b"\x80\x02")
    assert_same(torch_offload.load(path, mmap=mmap), tensors)


def test_a_directory_with_one_file(tmp_path):
    tensors = {"a": at(CPU, 3)}
    write(tmp_path / "x.safetensors", tensors)
    assert_same(torch_offload.load(tmp_path), tensors)


def test_a_directory_without_or_with_too_many(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no file"):
        torch_offload.load(tmp_path)
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", {})
    with pytest.raises(
        ValueError, match=r"holds 2 files \*.safetensors \(a.safetensors, b.safetensors\); name the one"
    ):
        torch_offload.load(tmp_path)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_other_devices(tmp_path, device):
    with pytest.raises(ValueError, match=f"onto offload devices, not onto {device}"):
        torch_offload.load(write(tmp_path / "x.safetensors", {}), device)


@both
def test_a_device_that_is_not_there(tmp_path, mmap):
    path = write(tmp_path / "x.safetensors", {"a": at(CPU, 3)})
    with pytest.raises(RuntimeError, match="there is no device offload:99"):
        torch_offload.load(path, "offload:99", mmap=mmap)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*x\.safetensors\.$"):
        torch_offload.load(tmp_path / "x.safetensors")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*x\.safetensors\.index\.json"):
        torch_offload.load(tmp_path / "x.safetensors.index.json")
    index, _ = shards(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"m-2.safetensors, which .*index.json names"):
        torch_offload.load(index)


@both
def test_no_tensor_is_made_before_all_headers_are_read(tmp_path, mmap):
    index, _ = shards(tmp_path)
    (tmp_path / "m-1.safetensors").write_bytes(b"no")
    before = torch_offload.memory_stats()["host.allocations.total"]
    with pytest.raises(ValueError, match=r"m-1\.safetensors is not a valid safetensors file"):
        torch_offload.load(index, mmap=mmap)
    assert torch_offload.memory_stats()["host.allocations.total"] == before


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"a": at(CPU, 1000), "b": at(CPU, 1000)})
    read = torch_offload.io.load._read_batch

    def cut(*arguments):
        os.truncate(path, 500)
        return read(*arguments)

    monkeypatch.setattr("torch_offload.io.load._read_batch", cut)
    with pytest.raises(
        RuntimeError, match=r"bytes from byte \d+ of .*x.safetensors only \d+ could be read: the file ends"
    ):
        torch_offload.load(path)


def test_a_file_that_is_changed_while_it_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"a": at(CPU, 1000)})
    read = torch_offload.io.load._read_batch

    def change(*arguments):
        os.utime(path, (1, 1))
        return read(*arguments)

    monkeypatch.setattr("torch_offload.io.load._read_batch", change)
    with pytest.raises(RuntimeError, match=r"x.safetensors was changed while"):
        torch_offload.load(path)


def test_the_result_is_a_state_dict(tmp_path):
    net = layers()
    path = write(tmp_path / "x.safetensors", dict(net.state_dict()))
    for assign in (False, True):
        target = layers().to("offload")
        target.load_state_dict(torch_offload.load(path), assign=assign)
        assert_same(dict(target.state_dict()), dict(net.state_dict()))
        assert_same(target(data(3, 8)), net.to(COMPUTE)(data(3, 8)))


def test_the_bar(tmp_path, capsys):
    path = write(tmp_path / "x.safetensors", {"a": at(CPU, 1000)})
    torch_offload.load(path)
    torch_offload.load(path, progress=False)
    torch_offload.load(path, progress=True, mmap=True)
    assert capsys.readouterr().err == ""
    torch_offload.load(path, progress=True)
    assert "load: " in capsys.readouterr().err


@pytest.mark.parametrize("progress", [None, False, True])
def test_the_bar_where_the_error_output_is_another(tmp_path, monkeypatch, progress):
    class Lines(list):
        def write(self, text):
            self.append(text)

        def flush(self):
            pass

    path, lines = write(tmp_path / "x.safetensors", {"a": at(CPU, 1000)}), Lines()
    monkeypatch.setattr("sys.stderr", lines)
    assert torch_offload.load(path, progress=progress)["a"].shape == (1000,)
    assert ("load" in "".join(lines)) == (progress is True)
    closed = (tmp_path / "log").open("w")
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    assert torch_offload.load(path, progress=None if progress else progress)["a"].shape == (1000,)


def test_metadata_that_is_null(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": at(CPU, 4)})
    contents = path.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length]) | {"__metadata__": None}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + contents[8 + length :])
    assert_same(torch_offload.load(path)["a"], at(CPU, 4))


# For a program: what work adds to the memory of the process's own, at most and in the end. Pages of a file that the system
# caches are not among it.
WATCHED = """
import threading, torch, torch_offload
def own():
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return int(fields["Private_Dirty"].split()[0]) << 10
def added(work):
    before = most = own()
    stop = False
    def watch():
        nonlocal most
        while not stop:
            most = max(most, own())
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    after = own()
    stop = True
    watcher.join()
    return result, max(most, after) - before, after - before
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("safetensors", lambda path, value: write(Path(path), value)),
        ("pt", lambda path, value: torch.save(value, path)),
    ],
    ids=["safetensors", "torch"],
)
def test_the_host_holds_the_weights_once(tmp_path, name, store):
    count, size = 24, 4 << 20
    small, whole = str(tmp_path / f"small.{name}"), str(tmp_path / f"x.{name}")
    store(whole, {f"w{k}": torch.full((size // 4,), float(k)) for k in range(count)})
    program = f"""
torch_offload.load({small!r})
tensors, most, after = added(lambda: torch_offload.load({whole!r}))
assert all((tensor == k).all() for k, tensor in enumerate(tensors.values()))
print(most, after)
"""
    store(small, {"a": at(CPU, 3)})
    most, after = map(int, passes(WATCHED + program).split())
    assert count * size <= after <= most <= 1.1 * count * size, (most, after)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pytorchs_saving_and_loading_hold_no_second_copy(tmp_path):
    """Of a state_dict: one tensor beside the model at a time, and where the file is mapped none."""
    program = f"""
path = {str(tmp_path / "x.pt")!r}
def build(count):
    return torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(count)).to("offload")
def check(net):
    assert all((p == k + 1).all() for k, p in enumerate(net.parameters()))
with torch.no_grad():
    for count in (1, 24):  # what is used late is there before anything is measured
        net = build(count)
        for k, parameter in enumerate(net.parameters()):
            parameter.fill_(k + 1)
        torch_offload.synchronize()
        _, saving, _ = added(lambda: torch.save(net.state_dict(), path))
        _, into, _ = added(lambda: net.load_state_dict(torch.load(path, mmap=True)))
        check(net)
        with torch.device("meta"):
            other = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(count))
        _, loading, _ = added(lambda: other.load_state_dict(torch.load(path, map_location="offload"), assign=True))
        check(other)
print(saving, into, loading)
"""
    model = 24 * (4 << 20)
    # What is freed shall go back to the system at once, and not lie in the holes of malloc's heap.
    saving, into, loading = map(int, passes(WATCHED + program, MALLOC_MMAP_THRESHOLD_="65536").split())
    assert saving <= 0.1 * model
    assert into <= 0.1 * model
    assert loading <= 1.1 * model


@pytest.mark.skipif(not CACHED, reason="reads host bytes in place")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_left_in_the_file_it_is_fetched_without_memory_on_the_host(tmp_path):
    path = write(tmp_path / "x.safetensors", {f"w{k}": torch.full((1 << 18,), float(k)) for k in range(16)})
    program = f"""
        import re, torch, torch_offload
        def mapped():  # KiB of the file's mapping that are in this process's page tables
            return sum(map(int, re.findall(r"x\\.safetensors\\n(?:.*\\n)*?Rss: *(\\d+)", open("/proc/self/smaps").read())))
        tensors = torch_offload.load({str(path)!r}, mmap=True)
        stats = torch_offload.memory_stats()
        assert stats["host.allocated_bytes.current"] == 0
        assert stats["host.file_bytes.current"] == 16 << 20
        x = torch.ones(1, device=torch_offload._C.paired_device(0))
        for _ in range(2):
            assert all((x * tensor)[-1].item() == k for k, tensor in enumerate(tensors.values()))
            torch_offload.empty_cache()
        assert torch_offload.memory_stats()["host.allocated_bytes.peak"] == 0
        assert mapped() == 0, mapped()
        assert tensors["w3"].cpu()[7] == 3
        assert mapped() >= 1 << 10, mapped()
    """
    passes(program)


def test_the_bar_of_tqdm(tmp_path, monkeypatch):
    shown = []

    class Bar:
        def __init__(self, total, **_):
            shown.append(total)

        update = staticmethod(shown.append)
        close = staticmethod(lambda: shown.append("closed"))

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    torch_offload.load(write(tmp_path / "x.safetensors", {"a": at(CPU, 1000)}), progress=True)
    assert shown == [4000, 4000, "closed"]
