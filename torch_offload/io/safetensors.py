"""The header of a safetensors file: checked before a byte of data is believed.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, the header in JSON, the data. It
promises that every byte of the data is one tensor's, which shows whether a file was cut or patched; so all of it is checked.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from torch_offload import _C
from torch_offload.io.entry import Contents, Entry, is_saved_by_torch
from torch_offload.io.index import parse_json

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,  # two to an element of torch's
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_LONGEST_HEADER = 100_000_000  # of the format
_LARGEST = 2**63 - 1


def read_header(file: _C.File) -> Contents:
    """The tensors of a file, in the header's order; they are built into a dict of themselves.

    Raises:
        ValueError: where the file isn't what the format says; the sentence names the file and what is wrong.
    """

    def refuse(what: str) -> ValueError:
        return ValueError(f"{file.path} is not a valid safetensors file: {what}.")

    if file.bytes < 8:
        raise refuse(f"it has {file.bytes} bytes, and 8 say how long its header is")
    begin = file.read(0, min(file.bytes, 9))
    length = int.from_bytes(begin[:8], "little")
    if is_saved_by_torch(begin):
        raise refuse("it looks like one of torch.save; load it under a name that does not end in .safetensors")
    if length > file.bytes - 8:
        raise refuse(f"its header would be {length} bytes long, and {file.bytes - 8} follow; it may be cut short")
    if length > _LONGEST_HEADER:
        raise refuse(f"its header would be {length} bytes long, and the format allows {_LONGEST_HEADER}")
    try:
        header = parse_json(file.read(8, length))
    except ValueError as error:
        raise refuse(f"its header is {error}") from None
    if not isinstance(header, dict):
        raise refuse("its header is JSON, but no object")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise refuse("__metadata__ is no object of strings")
    entries = {}
    for name, item in header.items():
        try:
            entries[name] = _entry(item, 8 + length)
        except ValueError as error:
            raise refuse(f"tensor {name!r} has {error}") from None
    try:
        _check_cover(entries.items(), 8 + length, file.bytes)
    except ValueError as error:
        raise refuse(str(error)) from None
    return Contents(file, entries, list(entries), dict)


def _entry(item: Any, data: int) -> Entry:
    if not isinstance(item, dict):
        raise ValueError("an entry that is no object")
    name, shape, offsets = (item.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"dtype {name!r}, which torch {torch.__version__} does not have")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise ValueError(f"shape {shape!r}, which is no list of whole numbers from 0 on")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise ValueError(f"data_offsets {offsets!r}, which are not two whole numbers from 0 on")
    begin, end = offsets
    if begin > end:
        raise ValueError(f"data_offsets {offsets}, which end before they begin")
    dtype = DTYPES[name]
    if name == "F4":
        if not shape or shape[-1] % 2:
            raise ValueError(f"shape {shape}, whose last size must be even for F4")
        shape = [*shape[:-1], shape[-1] // 2]
    if math.prod(size for size in shape if size > 0) * dtype.itemsize > _LARGEST:
        raise ValueError(f"shape {shape}, which has more bytes than can be addressed")
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise ValueError(f"data_offsets {offsets}, {end - begin} bytes, and a shape and dtype that make {nbytes}")
    return Entry(dtype, tuple(shape), data + begin, nbytes, dtype.itemsize)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _check_cover(entries: Iterable[tuple[str, Entry]], data: int, file_bytes: int) -> None:
    at, before = data, None
    for name, entry in sorted(entries, key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset + entry.nbytes > file_bytes:
            raise ValueError(
                f"tensor {name!r} ends at byte {entry.offset + entry.nbytes}, and the file has {file_bytes}; "
                "it may be cut short"
            )
        if entry.offset < at:
            raise ValueError(f"tensors {before!r} and {name!r} overlap at byte {entry.offset}")
        if entry.offset > at:
            raise ValueError(f"the {entry.offset - at} bytes from byte {at} on are no tensor's")
        at, before = entry.offset + entry.nbytes, name
    if at != file_bytes:
        raise ValueError(f"the {file_bytes - at} bytes from byte {at} on are no tensor's")
