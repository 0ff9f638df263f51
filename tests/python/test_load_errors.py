"""Damaged safetensors and indices: each is refused in one sentence that names the file and what is wrong."""

import json
import re
import struct

import pytest
import torch
from safetensors_files import write, write_bytes

import torch_offload


def one(dtype="U8", shape=(2,), offsets=(0, 2)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def two(first, second):
    return {
        "a": one(shape=[first[1] - first[0]], offsets=first),
        "b": one(shape=[second[1] - second[0]], offsets=second),
    }


HEADERS = {
    "not JSON": ("{'a': 1}", "its header is not JSON (Expecting property name enclosed in double quotes at character 1)"),
    "empty": ("", "its header is not JSON"),
    "nested": ("[" * 100_000, "its header is JSON that is nested too deeply"),
    "list": ("[]", "its header is JSON, but no object"),
    "metadata": ({"__metadata__": 3}, "__metadata__ is no object of strings"),
    "metadata value": ({"__metadata__": {"a": 3}}, "__metadata__ is no object of strings"),
    "key twice": ('{"a": 1, "a": 2}', "its header is JSON with the key 'a' twice in one object"),
    "inner key twice": ('{"a": {"dtype": "U8", "dtype": "I8"}}', "the key 'dtype' twice"),
    "no entry": ({"a": 3}, "tensor 'a' has an entry that is no object"),
    "unknown dtype": ({"a": one("F6_E3M2")}, f"tensor 'a' has dtype 'F6_E3M2', which torch {torch.__version__} does not have"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 2]}}, "tensor 'a' has dtype None"),
    "dtype of a list": ({"a": one(["U8"])}, "tensor 'a' has dtype ['U8']"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, "tensor 'a' has shape None"),
    "negative size": ({"a": one(shape=[-2])}, "tensor 'a' has shape [-2], which is no list of whole numbers from 0 on"),
    "half a size": ({"a": one(shape=[2.0])}, "tensor 'a' has shape [2.0]"),
    "true size": ({"a": one(shape=[True, 2])}, "tensor 'a' has shape [True, 2]"),
    "huge size": ({"a": one(shape=[2**63])}, "tensor 'a' has shape [9223372036854775808]"),
    "thousands of digits": ('{"a": {"dtype": "U8", "shape": [' + "9" * 5000 + "]}}", "tensor 'a' has shape ['9999"),
    "sizes that overflow": ({"a": one("F32", [2**40, 2**40])}, "which has more bytes than can be addressed"),
    "overflow beside 0": ({"a": one("F32", [0, 2**40, 2**40], [0, 0])}, "which has more bytes than can be addressed"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [2]}}, "tensor 'a' has data_offsets None"),
    "one offset": ({"a": one(offsets=[0])}, "tensor 'a' has data_offsets [0], which are not two whole numbers from 0 on"),
    "negative offset": ({"a": one(offsets=[-2, 0])}, "tensor 'a' has data_offsets [-2, 0]"),
    "backwards": ({"a": one(offsets=[2, 0])}, "tensor 'a' has data_offsets [2, 0], which end before they begin"),
    "wrong size": ({"a": one("F32", [2])}, "tensor 'a' has data_offsets [0, 2], 2 bytes, and a shape and dtype that make 8"),
    "odd fours": ({"a": one("F4", [3])}, "tensor 'a' has shape [3], whose last size must be even for F4"),
    "past the end": ({"a": one(shape=[9], offsets=[0, 9])}, "tensor 'a' ends at byte 77, and the file has 72; it may"),
    "overlap": (two((0, 3), (2, 4)), "tensors 'a' and 'b' overlap at byte"),
    "same bytes": (two((0, 4), (0, 4)), "tensors 'a' and 'b' overlap at byte"),
    "hole": (two((0, 1), (2, 4)), "the 1 bytes from byte"),
    "hole in front": ({"a": one(offsets=[2, 4])}, "the 2 bytes from byte"),
    "hole behind": ({"a": one(offsets=[0, 2])}, "the 2 bytes from byte"),
}  # fmt: skip


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header(tmp_path, case, mmap):
    header, sentence = HEADERS[case]
    path = write_bytes(tmp_path / "x.safetensors", header, bytes(4))
    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        torch_offload.load(path, mmap=mmap)
    assert str(raised.value).startswith(f"{path} is not a valid safetensors file: ")


FILES = {
    "short": (b"1234567", "it has 7 bytes, and 8 say how long its header is"),
    "empty": (b"", "it has 0 bytes"),
    "cut header": (
        struct.pack("<Q", 100) + b"{}",
        "its header would be 100 bytes long, and 2 follow; it may be cut short",
    ),
    "huge header": (b"\xff" * 8 + b"{}", "its header would be 18446744073709551615 bytes long, and 2 follow"),
    "not UTF-8": (struct.pack("<Q", 3) + b'{"\xff', "its header is not UTF-8"),
    "zip": (b"PK\x03\x04" + bytes(100), "it looks like one of torch.save"),
    "pickle": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9" + bytes(100), "it looks like one of torch.save"),
}


@pytest.mark.parametrize("case", FILES)
def test_no_such_file(tmp_path, case):
    contents, sentence = FILES[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a valid safetensors file: {sentence}")):
        torch_offload.load(path)


def test_a_header_that_is_longer_than_the_format_allows(tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(8 + 100_000_001)
    with pytest.raises(ValueError, match="100000001 bytes long, and the format allows 100000000"):
        torch_offload.load(path)


def test_a_cut_file(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.arange(100), "b": torch.arange(3)})
    whole = path.read_bytes()
    for length in (*range(0, 160, 7), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is not a valid safetensors file"):
            torch_offload.load(path)


INDICES = {
    "not JSON": ("{", "it is not JSON"),
    "list": ("[]", 'it has no "weight_map" of strings'),
    "no map": ("{}", 'it has no "weight_map" of strings'),
    "map of numbers": ({"weight_map": {"a": 3}}, 'it has no "weight_map" of strings'),
    "key twice": ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "the key 'a' twice"),
    "above": (
        {"weight_map": {"a": "../x.safetensors"}},
        "tensor 'a' is in '../x.safetensors', which is no file beside it",
    ),
    "absolute": (
        {"weight_map": {"a": "/x.safetensors"}},
        "tensor 'a' is in '/x.safetensors', which is no file beside it",
    ),
    "the directory": ({"weight_map": {"a": ".."}}, "tensor 'a' is in '..'"),
    "nowhere": ({"weight_map": {"a": ""}}, "tensor 'a' is in ''"),
    "other tensors": ({"weight_map": {"b": "x.safetensors"}}, "tensor 'b' is in x.safetensors, which has 1 others"),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_damaged_index(tmp_path, case):
    content, sentence = INDICES[case]
    write(tmp_path / "x.safetensors", {"a": torch.zeros(1)})
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        torch_offload.load(index)
    assert str(raised.value).startswith(str(index))
