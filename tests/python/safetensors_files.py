"""Writes safetensors files for tests, right ones and wrong ones, without the package of that name."""

import json
import struct
from pathlib import Path
from typing import Any

import torch

NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def raw(value: torch.Tensor) -> bytes:
    """The bytes of a CPU tensor's values, in row-major order."""
    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def write_bytes(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file of any header, a str or what JSON can hold, and any data."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write(path: Path, tensors: dict[str, torch.Tensor], pad: int = 0) -> Path:
    """A right file; the data begins `pad` bytes behind a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        begin = len(data)
        data += raw(value)
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header)
    return write_bytes(path, text + " " * ((pad - len(text)) % 8), data)
