"""Files of torch.save for tests that are not as torch.save writes them."""

import zipfile
from pathlib import Path

DATA = 30  # the bytes of a record's header, without its name


def records(path: Path) -> dict[str, bytes]:
    """The records of a file, in its order, by their names without the folder."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_records(path: Path, contents: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """A file of these records, one behind the other: the storages are aligned to nothing."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, value in contents.items():
            archive.writestr(f"archive/{name}", value)
    return path


def place(path: Path, record: str) -> int:
    """Where a record's bytes begin in a file."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        info = next(info for info in archive.infolist() if info.filename.partition("/")[2] == record)
        file.seek(info.header_offset + 26)
        lengths = file.read(4)
    return info.header_offset + DATA + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def patch(path: Path, offset: int, data: bytes) -> None:
    """Writes over a file's bytes."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
