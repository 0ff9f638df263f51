"""Files of torch.save that are damaged, or hold what isn't loaded: each is refused in one sentence that says so."""

import io
import json
import os
import pickle
import re
import struct
import zipfile

import pytest
import torch
from helpers import CPU, assert_same, at
from torch_files import patch, place, records, write_records

import torch_offload

both = pytest.mark.parametrize("mmap", [False, True], ids=["memory", "mmap"])


@pytest.fixture
def path(tmp_path):
    torch.save({"a": torch.arange(8.0), "b": torch.ones(3, dtype=torch.int64)}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def refused(path, sentence, **options):
    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        torch_offload.load(path, **options)
    assert str(raised.value).startswith(f"{path} is not a file of torch.save that can be loaded: ")
    return str(raised.value)


def pickled(function, *arguments):
    """A pickle in protocol 2 of a call."""

    class Call:
        def __reduce__(self):
            return function, arguments

    return pickle.dumps({"a": Call()}, protocol=2)


class Storage:
    """Pickled as a storage of torch.save: key, and how many float32 it has."""

    def __init__(self, *identity):
        self.identity = identity


def tensor_pickle(*tensors):
    """data.pkl of tensors: (identity of the storage, offset, sizes, strides)."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return value.identity if isinstance(value, Storage) else None

    class Tensor:
        def __init__(self, identity, *place):
            self.arguments = (Storage(*identity), *place, False, {})

        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, self.arguments

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({str(k): Tensor(*tensor) for k, tensor in enumerate(tensors)})
    return buffer.getvalue()


def floats(key="0", count=8):
    return ("storage", torch.FloatStorage, key, "cpu", count)


TENSORS = {
    "too long": ([(floats(), 0, (9,), (1,))], "its record data/0 has 32 bytes, and a tensor in it needs 36."),
    "too far": ([(floats(), 5, (4,), (1,))], "its record data/0 has 32 bytes, and a tensor in it needs 36."),
    "too wide": ([(floats(), 0, (2,), (8,))], "its record data/0 has 32 bytes, and a tensor in it needs 36."),
    "the second": (
        [(floats(), 0, (2,), (1,)), (floats(), 0, (80,), (1,))],
        "its record data/0 has 32 bytes, and a tensor in it needs 320.",
    ),
    "before": ([(floats(), -1, (1,), (1,))], "its data.pkl can't be read (RuntimeError: "),
    "backwards": ([(floats(), 2, (2,), (-1,))], "its data.pkl can't be read (RuntimeError: "),
    "far away": ([(floats(), 2**62, (3,), (1,))], "its data.pkl can't be read (RuntimeError: "),
    "uncountable": ([(floats(), 0, (2**40, 2**40), (2**40, 1))], "its data.pkl can't be read (RuntimeError: "),
    "large storage": ([(floats(count=9), 0, (1,), (1,))], "its record data/0 has 32 bytes, and the storage in it 36; "),
    "small storage": ([(floats(count=7), 0, (1,), (1,))], "its record data/0 has 32 bytes, and the storage in it 28; "),
    "negative storage": ([(floats(count=-1), 0, (0,), (1,))], "data/0 has 32 bytes, and the storage in it -4; "),
    "no record": ([(floats("7"), 0, (1,), (1,))], "it has no record data/7"),
    "other record": ([(floats("../version"), 0, (1,), (1,))], "it has no record data/../version"),
    "no key": ([(floats(7), 0, (1,), (1,))], "its data.pkl names a storage by ('storage', "),
    "no type": ([(("storage", 3, "0", "cpu", 8), 0, (1,), (1,))], "its data.pkl names a storage by ('storage', 3, "),
    "no size": ([(("storage", torch.FloatStorage, "0", "cpu"), 0, (1,), (1,))], "its data.pkl names a storage by "),
    "no number": ([(floats(count="8"), 0, (1,), (1,))], "its data.pkl names a storage by "),
}


@both
@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_in_their_storage(path, case, mmap):
    tensors, sentence = TENSORS[case]
    contents = records(path)
    good = tensor_pickle((floats(), 1, (2, 3), (3, 1)))
    write_records(path, {**contents, "data.pkl": good})
    assert_same(torch_offload.load(path, mmap=mmap), {"0": torch.arange(8.0)[1:7].reshape(2, 3)})
    write_records(path, {**contents, "data.pkl": tensor_pickle(*tensors)})
    refused(path, sentence, mmap=mmap)


PICKLES = {
    "cut": (lambda good: good[:-1], "its data.pkl can't be read ("),
    "empty": (lambda good: b"", "its data.pkl can't be read (EOFError"),
    "noise": (lambda good: bytes(range(256)), "more than tensors and plain values"),
    "protocol 4": (lambda good: pickle.dumps({}, protocol=4), "more than tensors and plain values"),
    "module": (lambda good: pickled(torch.nn.Linear, 3, 2), "GLOBAL torch.nn.modules.linear.Linear was not an allowed global"),
    "function": (lambda good: pickled(print, "unpickled"), "GLOBAL print was not an allowed global"),
    "system": (lambda good: pickled(os.mkdir, "unpickled"), "whose module posix is blocked"),
}  # fmt: skip


@both
@pytest.mark.parametrize("case", PICKLES)
def test_what_is_not_unpickled(path, case, mmap, capsys, monkeypatch, recwarn):
    monkeypatch.chdir(path.parent)
    make, sentence = PICKLES[case]
    contents = records(path)
    write_records(path, {**contents, "data.pkl": make(contents["data.pkl"])})
    # Whatever PyTorch is told of torch.load.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    said = refused(path, sentence, mmap=mmap)
    if "more than" in sentence or "global" in sentence:
        assert "nothing else is unpickled (weights_only=True of torch.load)" in said
    assert not (path.parent / "unpickled").exists()
    assert capsys.readouterr().out == ""


UNSUPPORTED = {
    "coo": (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "a quantized tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
}


@both
@pytest.mark.parametrize("case", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense(tmp_path, case, mmap):
    make, what = UNSUPPORTED[case]
    torch.save({"a": torch.ones(2), "b": make()}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", f"it holds {what}, and only dense tensors are loaded.", mmap=mmap)
    # Nothing is left behind for the next file that PyTorch loads.
    torch.save({"a": torch.ones(2)}, tmp_path / "y.pt")
    with torch.sparse.check_sparse_tensor_invariants():
        assert_same(torch.load(tmp_path / "y.pt"), {"a": torch.ones(2)})


@pytest.mark.parametrize("name", ["wrapper_subclass", "device_tensor_from_cpu_tensor", "device_tensor_from_numpy"])
def test_tensors_whose_bytes_are_in_no_storage(path, name):
    function = getattr(torch._utils, f"_rebuild_{name}")
    write_records(path, {**records(path), "data.pkl": pickled(function, 1)})
    refused(path, "it holds a tensor subclass" if name == "wrapper_subclass" else "it holds a tensor of a device")


@both
def test_a_cut_file(path, mmap):
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 41), len(whole) - 1):
        path.write_bytes(whole[:length])
        begins = f"it has {length} bytes and does not begin as a zip"
        refused(
            path, begins if length < 4 else f"its {length} bytes end in no table of records; it may be cut", mmap=mmap
        )


def test_a_piece_too_little_or_too_much(path):
    whole = path.read_bytes()
    middle = place(path, "data/0")
    path.write_bytes(whole[: middle + 8] + whole[middle + 16 :])
    refused(path, "; it may be ")  # where it is noticed depends on Python's version
    path.write_bytes(whole[: middle + 8] + bytes(8) + whole[middle + 8 :])
    refused(path, " no record byteorder begins, as its table says; it may be damaged")


RECORDS = {
    "no pickle": (lambda it: {"byteorder": b"little"}, "it has 1 records, and none of them is data.pkl"),
    "no records": (lambda it: {}, "does not begin as a zip"),
    "big": (lambda it: {**it, "byteorder": b"big"}, "its byte order is big and this machine's little; write it again on this"),
    "no order": (lambda it: {name: value for name, value in it.items() if name != "byteorder"}, None),
    "script": (lambda it: {**it, "constants.pkl": b""}, "it is a TorchScript archive; torch.jit.load opens it"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
def test_records(path, case):
    change, sentence = RECORDS[case]
    expected = torch.load(path)
    write_records(path, change(records(path)))
    if sentence is None:
        assert_same(torch_offload.load(path), expected)
    else:
        refused(path, sentence)


@both
def test_compressed_records(path, mmap):
    write_records(path, records(path), zipfile.ZIP_DEFLATED)
    refused(
        path,
        " is compressed or encrypted, which torch.save does not do; write it again with",
        mmap=mmap,
    )


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_record_twice(path):
    contents = records(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in [*contents.items(), ("data/0", bytes(32))]:
            archive.writestr(f"archive/{name}", value)
    refused(path, f"of its {len(contents) + 1} records only {len(contents)} have names of their own")


def table_entry(path, record):
    """Where a record's entry in the zip's table begins."""
    whole = path.read_bytes()
    name = next(name for name in zipfile.ZipFile(path).namelist() if name.partition("/")[2] == record)
    return whole.rindex(name.encode()) - 46


@both
def test_records_that_are_elsewhere(path, mmap):
    whole = path.read_bytes()
    entry, other = table_entry(path, "data/0"), table_entry(path, "data/1")
    header = struct.unpack_from("<I", whole, other + 42)[0]
    patch(path, entry + 42, struct.pack("<I", header))
    refused(path, f"at byte {header} no record data/0 begins, as its table says; it may be damaged", mmap=mmap)
    patch(path, entry + 42, struct.pack("<I", len(whole) - 10))
    refused(path, f"at byte {len(whole) - 10} no record data/0 begins", mmap=mmap)


@both
def test_records_that_overlap(path, mmap):
    # data/0, of as many bytes as lie before the end of data/1, with a pickle that agrees.
    contents = records(path)
    write_records(
        path, {**contents, "data.pkl": tensor_pickle((floats(), 0, (8,), (1,)), (floats("1", 6), 0, (6,), (1,)))}
    )
    begin, other = place(path, "data/0"), place(path, "data/1")
    count = (other - begin) // 4 + 2
    write_records(
        path,
        {**contents, "data.pkl": tensor_pickle((floats(count=count), 0, (8,), (1,)), (floats("1", 6), 0, (6,), (1,)))},
    )
    entry = table_entry(path, "data/0")
    patch(path, entry + 20, struct.pack("<II", count * 4, count * 4))
    refused(path, f"its records data/0 and data/1 overlap at byte {place(path, 'data/1')}", mmap=mmap)


@both
def test_a_record_that_goes_on_behind_the_records(path, mmap):
    contents = records(path)
    count = 1000
    write_records(path, {**contents, "data.pkl": tensor_pickle((floats(count=count), 0, (8,), (1,)))})
    patch(path, table_entry(path, "data/0") + 20, struct.pack("<II", count * 4, count * 4))
    refused(
        path,
        f"its record data/0 ends at byte {place(path, 'data/0') + 4 * count}, and its table of records begins",
        mmap=mmap,
    )


@both
@pytest.mark.parametrize("name", ["x.pt", "x"])
def test_the_format_before_zip(tmp_path, mmap, name):
    torch.save({"a": torch.ones(3)}, tmp_path / name, _use_new_zipfile_serialization=False)
    refused(
        tmp_path / name,
        "it is a pickle as torch.save wrote before version 1.6, and no zip; write it again with",
        mmap=mmap,
    )


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script(tmp_path):
    torch.jit.script(torch.nn.Linear(3, 2)).save(tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "it is a TorchScript archive; torch.jit.load opens it")


def test_a_name_of_safetensors_is_not_unpickled(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(
        ValueError, match=r"not a valid safetensors file: it looks like one of torch\.save; load it under"
    ):
        torch_offload.load(tmp_path / "x.safetensors")


@both
def test_no_tensor_is_made_before_all_headers_are_read(tmp_path, mmap):
    torch.save({"a": at(CPU, 3)}, tmp_path / "m-1.bin")
    torch.save({"b": at(CPU, 3), "c": torch.nn.Linear(2, 2)}, tmp_path / "m-2.bin")
    index = tmp_path / "m.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.bin", "b": "m-2.bin"}}))
    before = torch_offload.memory_stats()["host.allocations.total"]
    with pytest.raises(ValueError, match=r"m-2\.bin is not a file of torch\.save that can be loaded"):
        torch_offload.load(index, mmap=mmap)
    assert torch_offload.memory_stats()["host.allocations.total"] == before


@pytest.mark.parametrize("how", ["cut", "touch"])
def test_a_file_that_is_changed_while_it_is_read(path, how, monkeypatch):
    read = torch_offload.io.load._read_batch
    begin = place(path, "data/0")

    def change(*arguments):
        os.truncate(path, begin + 4) if how == "cut" else os.utime(path, (1, 1))
        return read(*arguments)

    monkeypatch.setattr("torch_offload.io.load._read_batch", change)
    sentence = r"x.pt only \d+ could be read: the file ends" if how == "cut" else r"x.pt was changed while"
    with pytest.raises(RuntimeError, match=sentence):
        torch_offload.load(path)
