"""``torch_offload.load``: tensors from files onto the offload device."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_offload import _C
from torch_offload.io.entry import Contents, Entry, is_saved_by_torch
from torch_offload.io.index import read_index
from torch_offload.io.progress import Progress
from torch_offload.io.safetensors import read_header
from torch_offload.io.torch_file import read_structure

# Memory is asked for, and the bar moves, by so much at a time.
_BATCH_BYTES = 256 << 20
# What a directory is searched for, in this order.
_PATTERNS = (
    "*.safetensors.index.json",
    "*.safetensors",
    "*.bin.index.json",
    "pytorch_model.bin",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
)
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class _Wanted:
    name: str
    file: _C.File
    entry: Entry


def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "offload",
    *,
    mmap: bool = False,
    progress: bool | None = None,
) -> Any:
    """Loads a file of tensors, safetensors or one of ``torch.save``, onto the offload device, without a second copy in memory.

    The bytes are read by several threads straight into the tensors' own (page-locked) memory. With ``mmap`` they stay in the
    file: what an operation needs is read when it is fetched, and a tensor takes no host memory until it is written to; then it
    gets memory of its own, and the file stays as it is.
    ``model.load_state_dict(torch_offload.load(path, mmap=True), assign=True)`` runs a model straight from disk, or trains it.

    Of a file of ``torch.save`` only what ``torch.load(weights_only=True)`` allows is unpickled: tensors, plain values and
    containers of them, and the classes that ``torch.serialization.add_safe_globals`` was given. There is no way to unpickle
    anything else.

    Args:
        path: a ``.safetensors`` file; a file of ``torch.save`` in its zip format, under any other name; the index
            (``.safetensors.index.json``, ``.bin.index.json``) of a model in several files of either kind; or a directory that
            holds one of these, where safetensors are looked for first.
        device: ``"offload"`` or ``"offload:i"``. From there ``.to("cuda")`` fetches.
        mmap: leave the bytes in the file. It must not be written to while the tensors are in use: what is noticed is an error.
        progress: show a bar on the error output; by default where that is a terminal. ``mmap`` has nothing to wait for.

    Returns:
        Of safetensors every tensor by its name, contiguous. Tensors that the model ties are in the file once, as the format has
        it, so ``load_state_dict`` wants ``strict=False`` or the model ties them itself. Of a file of ``torch.save`` what was
        saved, with every tensor on ``device``, wherever it was: tensors that shared a storage share it again. Of several files
        one dict: what the index names, in its order and from the file that it says, then what else is in the files.

    Raises:
        FileNotFoundError: where there is no such file or directory, or a directory holds no such file.
        ValueError: for a file that is damaged or of another kind, for one of ``torch.save`` that holds what is not unpickled,
            or sparse, nested or quantized tensors, and for other devices. All headers are checked before any tensor is made.
        RuntimeError: where reading fails. With ``mmap``, a file that was changed since is an error of the operation that needs
            the bytes; where the disk fails while they are on their way, the tensor is NaN for operations that were already
            enqueued, and the next use of any offload tensor, or :func:`torch_offload.synchronize`, says so.
    """
    device = torch.device(device)
    if device.type != "offload":
        raise ValueError(
            f"tensors are loaded onto offload devices, not onto {device}; load them and move what you need."
        )
    path = Path(path)
    path = _choose(path) if path.is_dir() else path
    if path.suffix != ".json":
        (value,) = _build([_contents(_open(path))], device, mmap, progress)
        return value
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}.")
    places = read_index(path)
    files = {place: _open(place, f", which {path} names") for place in dict.fromkeys(places.values())}
    shards = {place: _contents(file) for place, file in files.items()}
    names = _names_of(path, places, shards)
    values = dict(zip(shards, _build(list(shards.values()), device, mmap, progress), strict=True))
    return {name: values[place][name] for name, place in names.items()}


def _open(path: Path, whose: str = "") -> _C.File:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}{whose}.")
    return _C.File(str(path))


def _choose(directory: Path) -> Path:
    for pattern in _PATTERNS:
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found[:5]) + (", ..." if len(found) > 5 else "")
            raise ValueError(f"{directory} holds {len(found)} files {pattern} ({names}); name the one to load.")
    raise FileNotFoundError(f"{directory} holds no file {', '.join(_PATTERNS[:-1])} or {_PATTERNS[-1]}.")


def _contents(file: _C.File) -> Contents:
    # A name that promises safetensors keeps its promise: nothing of such a file is unpickled.
    suffix = Path(file.path).suffix
    saved = suffix in _TORCH_SUFFIXES or is_saved_by_torch(file.read(0, min(file.bytes, 9)))
    return read_structure(file) if saved and suffix != ".safetensors" else read_header(file)


def _names_of(index: Path, places: dict[str, Path], shards: dict[Path, Contents]) -> dict[str, Path]:
    """Which file each tensor is taken from: what the index says, and the others after that."""
    for place, shard in shards.items():
        if shard.names is None:
            raise ValueError(f"{place}, which {index} names, holds no dict of tensors by their names.")
    for name, place in places.items():
        if name not in shards[place].names:
            raise ValueError(
                f"{index} says that tensor {name!r} is in {place.name}, which has {len(shards[place].names)} others."
            )
    others = [(name, place) for place, shard in shards.items() for name in shard.names if name not in places]
    name, count = next(iter(Counter(name for name, _ in others).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{index} does not name tensor {name!r}, which {count} of its files have.")
    return places | dict(others)


def _build(files: list[Contents], device: torch.device, mmap: bool, progress: bool | None) -> list[Any]:
    """What each of the files holds."""
    wanted = [_Wanted(name, contents.file, entry) for contents in files for name, entry in contents.entries.items()]
    # What can't be used where it lies in the file is read, too.
    stay = [item for item in wanted if mmap and item.entry.aligned]
    loaded = {
        item: item.file.tensor(item.entry.offset, list(item.entry.shape), item.entry.dtype, device) for item in stay
    }
    _read([item for item in wanted if item not in loaded], device, loaded, progress)
    by_file: dict[_C.File, dict[str, torch.Tensor]] = {contents.file: {} for contents in files}
    for item in wanted:
        by_file[item.file][item.name] = loaded[item]
    return [contents.build(by_file[contents.file]) for contents in files]


def _read(wanted: list[_Wanted], device: torch.device, loaded: dict[_Wanted, torch.Tensor], shown: bool | None) -> None:
    progress = Progress(sum(item.entry.nbytes for item in wanted), shown)
    # One batch is read while memory is got for the next one.
    with ThreadPoolExecutor(max_workers=1) as reader, progress:
        pending = None
        for batch in _batches(wanted):
            tensors = [torch.empty(item.entry.shape, dtype=item.entry.dtype, device=device) for item in batch]
            loaded.update(zip(batch, tensors, strict=True))
            if pending is not None:
                progress.add(pending.result())
            pending = reader.submit(_read_batch, batch, tensors)
        if pending is not None:
            progress.add(pending.result())
    for file in dict.fromkeys(item.file for item in wanted):
        file.require_unchanged()


def _batches(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Tensors that lie one after the other in a file, up to the size of a batch together."""
    order = {file: number for number, file in enumerate(dict.fromkeys(item.file for item in wanted))}
    batch: list[_Wanted] = []
    size = 0
    for item in sorted(wanted, key=lambda item: (order[item.file], item.entry.offset)):
        if batch and (item.file is not batch[0].file or size + item.entry.nbytes > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.entry.nbytes
    if batch:
        yield batch


def _read_batch(batch: list[_Wanted], tensors: list[torch.Tensor]) -> int:
    places = [(item.entry.offset, tensor) for item, tensor in zip(batch, tensors, strict=True)]
    batch[0].file.read_tensors(places)
    return sum(item.entry.nbytes for item in batch)
