"""What every format says of a file before a byte of data is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_offload import _C


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its bytes are those from ``offset``, counted from the file's beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    alignment: int

    @property
    def aligned(self) -> bool:
        """Whether its elements can be used where they are, were the file memory."""
        return self.offset % self.alignment == 0


@dataclass(frozen=True)
class Contents:
    """What a file holds, by its checked header.

    Args:
        file: the file.
        entries: what there is to read, by name.
        names: the keys of what is built, where that is a dict; None where not.
        build: makes what ``load`` returns of the entries' tensors.
    """

    file: _C.File
    entries: dict[str, Entry]
    names: list[str] | None
    build: Callable[[dict[str, torch.Tensor]], Any]


def is_saved_by_torch(begin: bytes) -> bool:
    """Whether a file that begins with these 9 bytes is one of ``torch.save``, and no safetensors of such a length."""
    return begin.startswith((b"PK\x03\x04", b"\x80\x02\x8a\x0a")) and begin[8:] != b"{"
