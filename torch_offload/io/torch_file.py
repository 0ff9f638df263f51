"""The structure of a file of torch.save: where its storages lie, and the objects around them.

Such a file is a zip of a pickle, ``data.pkl``, and one uncompressed record ``data/KEY`` for each storage. The pickle is read by
PyTorch's restricted unpickler, the one of ``torch.load(weights_only=True)``, and twice: first over storages without memory,
which shows every storage's size and that the file can be read at all; then over storages that hold the bytes. So tensors that
share a storage share it again, and everything around them is as ``torch.load`` makes it.
"""

import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch._weights_only_unpickler import Unpickler

from torch_offload import _C
from torch_offload.io.entry import Contents, Entry

# The elements of one storage may have several types: it is usable in place where the widest of them is.
_ALIGNMENT = torch.complex128.itemsize
_LOCAL_HEADER = struct.Struct(
    "<4s4xH16xHH"
)  # signature, compression, and the lengths of the name and of what follows it
_UNSUPPORTED = {
    b"torch._utils\n_rebuild_sparse_tensor\n": "a sparse tensor",
    b"torch.sparse\n": "a sparse tensor",
    b"torch._utils\n_rebuild_nested_tensor\n": "a nested tensor",
    b"torch._utils\n_rebuild_qtensor\n": "a quantized tensor",
    b"torch._utils\n_rebuild_wrapper_subclass\n": "a tensor subclass without bytes of its own",
    b"torch._utils\n_rebuild_device_tensor_from_": "a tensor of a device whose storages have no bytes in files",
}


class _FileError(ValueError):
    """What is wrong with a file, as the end of a sentence."""


def read_structure(file: _C.File) -> Contents:
    """The storages of a file, by their keys; what is built is what was saved.

    Raises:
        ValueError: where the file is damaged, or holds what can't be loaded; the sentence names the file and what is wrong.
    """
    try:
        records = _Records(file)
        pickled = records.read("data.pkl")
        for function, what in _UNSUPPORTED.items():
            if function in pickled:
                raise _FileError(f"it holds {what}, and only dense tensors are loaded")
        storages = _Storages(records)
        value = _unpickle(pickled, storages.find)
        storages.check()
    except _FileError as error:
        raise ValueError(f"{file.path} is not a file of torch.save that can be loaded: {error}.") from error.__cause__

    def build(tensors: dict[str, torch.Tensor]) -> Any:
        by_key = {key: tensor.untyped_storage() for key, tensor in tensors.items()}
        try:
            return _unpickle(pickled, lambda key, nbytes: by_key[key])
        except _FileError as error:
            raise ValueError(
                f"{file.path} is not a file of torch.save that can be loaded: {error}."
            ) from error.__cause__

    return Contents(file, storages.entries, list(value) if isinstance(value, dict) else None, build)


class _Reader(io.RawIOBase):
    """A file for ``zipfile``."""

    def __init__(self, file: _C.File) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.bytes}[whence]
        if at < 0:
            raise OSError("a place before the file's beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._file.bytes - self._at))
        buffer[:count] = self._file.read(self._at, count)
        self._at += count
        return count


class _Records:
    """The records of a zip, where each can be used as it lies there."""

    def __init__(self, file: _C.File) -> None:
        self.file = file
        begin = file.read(0, min(file.bytes, 4))
        if begin[:1] == b"\x80":
            raise _FileError(
                "it is a pickle as torch.save wrote before version 1.6, and no zip; "
                "write it again with torch.save(torch.load(old), new)"
            )
        if begin != b"PK\x03\x04":
            raise _FileError(f"it has {file.bytes} bytes and does not begin as a zip; it may be damaged")
        try:
            with zipfile.ZipFile(_Reader(file)) as archive:
                found = archive.infolist()
                self.end = archive.start_dir
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
            raise _FileError(f"its {file.bytes} bytes end in no table of records; it may be cut short") from error
        self._infos = {info.filename: info for info in found}
        if len(self._infos) < len(found):
            raise _FileError(f"of its {len(found)} records only {len(self._infos)} have names of their own")
        first = found[0].filename if found else ""
        self._folder = first.partition("/")[0] + "/"
        if self._folder + "data.pkl" not in self._infos:
            raise _FileError(f"it has {len(found)} records, and none of them is data.pkl")
        if self._folder + "constants.pkl" in self._infos:
            raise _FileError("it is a TorchScript archive; torch.jit.load opens it")
        order = (
            self.read("byteorder").decode("ascii", "replace") if self._folder + "byteorder" in self._infos else "little"
        )
        if order != sys.byteorder:
            raise _FileError(
                f"its byte order is {order} and this machine's {sys.byteorder}; write it again on this machine "
                "with torch.save(torch.load(old), new)"
            )

    def read(self, name: str) -> bytes:
        """All of a record."""
        return self.file.read(*self.place(name))

    def place(self, name: str) -> tuple[int, int]:
        """The offset in the file, and the bytes, of a record."""
        info = self._infos.get(self._folder + name)
        if info is None:
            raise _FileError(f"it has no record {name}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise _FileError(
                f"its record {name} is compressed or encrypted, which torch.save does not do; "
                "write it again with torch.save(torch.load(old), new)"
            )
        stored = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        length = _LOCAL_HEADER.size + len(stored)
        damaged = _FileError(
            f"at byte {info.header_offset} no record {name} begins, as its table says; it may be damaged"
        )
        if not 0 <= info.header_offset <= self.end - length:
            raise damaged
        header = self.file.read(info.header_offset, length)
        signature, compression, name_length, extra_length = _LOCAL_HEADER.unpack_from(header)
        if (signature, compression, name_length) != (b"PK\x03\x04", 0, len(stored)) or not header.endswith(stored):
            raise damaged
        offset = info.header_offset + length + extra_length
        if offset + info.file_size > self.end:
            raise _FileError(
                f"its record {name} ends at byte {offset + info.file_size}, and its table of records begins "
                f"at {self.end}; it may be damaged"
            )
        return offset, info.file_size


class _Storages:
    """Storages without memory, which note what a pickle asks for."""

    def __init__(self, records: _Records) -> None:
        self.entries: dict[str, Entry] = {}
        self._records = records
        self._made: dict[str, torch.UntypedStorage] = {}

    def find(self, key: str, nbytes: int) -> torch.UntypedStorage:
        if key not in self.entries:
            offset, there = self._records.place(f"data/{key}")
            self.entries[key] = Entry(torch.uint8, (there,), offset, there, _ALIGNMENT)
            self._made[key] = torch.UntypedStorage(there, device="meta")
        if self.entries[key].nbytes != nbytes:
            raise _FileError(
                f"its record data/{key} has {self.entries[key].nbytes} bytes, and the storage in it {nbytes}; "
                "it may be damaged"
            )
        return self._made[key]

    def check(self) -> None:
        """That every tensor ends where its storage does, and no storage lies in another one."""
        at, before = 0, ""
        for key, entry in sorted(self.entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            # A storage without memory grows to whatever a tensor wants of it.
            needed = self._made[key].nbytes()
            if needed != entry.nbytes:
                raise _FileError(f"its record data/{key} has {entry.nbytes} bytes, and a tensor in it needs {needed}")
            if entry.offset < at:
                raise _FileError(f"its records data/{before} and data/{key} overlap at byte {entry.offset}")
            at, before = entry.offset + entry.nbytes, key


def _unpickle(pickled: bytes, storage: Callable[[str, int], torch.UntypedStorage]) -> Any:
    def find(identity: Any) -> torch.storage.TypedStorage:
        try:
            _, kind, key, _, count = identity
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            nbytes = count * dtype.itemsize
        except (TypeError, ValueError, AttributeError):
            raise _FileError(f"its data.pkl names a storage by {identity!r}") from None
        if not isinstance(key, str) or not isinstance(nbytes, int):
            raise _FileError(f"its data.pkl names a storage by {identity!r}")
        return torch.storage.TypedStorage(wrap_storage=storage(key, nbytes), dtype=dtype, _internal=True)

    unpickler = Unpickler(io.BytesIO(pickled), encoding="utf-8")
    unpickler.persistent_load = find
    try:
        return unpickler.load()
    except _FileError:
        raise
    except pickle.UnpicklingError as error:
        raise _FileError(
            "it holds more than tensors and plain values, and nothing else is unpickled (weights_only=True of torch.load): "
            + str(error).rstrip(".")
        ) from error
    except Exception as error:
        raise _FileError(f"its data.pkl can't be read ({type(error).__name__}: {error}); it may be damaged") from error
