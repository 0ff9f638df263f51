"""``torch_offload.load``: tensors from safetensors files onto the offload device."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_offload import _C
from torch_offload.io.progress import Progress
from torch_offload.io.safetensors import Entry, read_header, read_index

# Memory is asked for, and the bar moves, by so much at a time.
_BATCH_BYTES = 256 << 20


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
) -> dict[str, torch.Tensor]:
    """Loads tensors from safetensors onto the offload device, without a second copy of them in memory.

    The bytes are read by several threads straight into the tensors' own (page-locked) memory. With ``mmap`` they stay in the
    file: what an operation needs is read when it is fetched, and a tensor takes no host memory until it is written to; then it
    gets memory of its own, and the file stays as it is.
    ``model.load_state_dict(torch_offload.load(path, mmap=True), assign=True)`` runs a model straight from disk, or trains it.

    Args:
        path: a ``.safetensors`` file, the ``.safetensors.index.json`` of a model in several files, or a directory that holds
            either.
        device: ``"offload"`` or ``"offload:i"``. From there ``.to("cuda")`` fetches.
        mmap: leave the bytes in the file. It must not be written to while the tensors are in use: what is noticed is an error.
        progress: show a bar on the error output; by default where that is a terminal. ``mmap`` has nothing to wait for.

    Returns:
        Every tensor by its name, contiguous. Tensors that the model ties are in the file once, as the format has it, so
        ``load_state_dict`` wants ``strict=False`` or the model ties them itself.

    Raises:
        FileNotFoundError: where there is no such file or directory, or a directory holds no safetensors.
        ValueError: for a file that is damaged or is no safetensors, and for other devices. All headers are checked before any
            tensor is made.
        RuntimeError: where reading fails. With ``mmap``, a file that was changed since is an error of the operation that needs
            the bytes; where the disk fails while they are on their way, the tensor is NaN for operations that were already
            enqueued, and the next use of any offload tensor, or :func:`torch_offload.synchronize`, says so.
    """
    device = torch.device(device)
    if device.type != "offload":
        raise ValueError(
            f"tensors are loaded onto offload devices, not onto {device}; load them and move what you need."
        )
    wanted = _tensors_of(Path(path))
    loaded: dict[str, torch.Tensor] = {}
    # What can't be used where it lies in the file is read, too.
    stays = {item.name for item in wanted if mmap and item.entry.aligned}
    for item in wanted:
        if item.name in stays:
            loaded[item.name] = item.file.tensor(item.entry.offset, list(item.entry.shape), item.entry.dtype, device)
    _read([item for item in wanted if item.name not in stays], device, loaded, progress)
    return {item.name: loaded[item.name] for item in wanted}


def _tensors_of(path: Path) -> list[_Wanted]:
    path = _choose(path) if path.is_dir() else path
    if path.suffix != ".json":
        file = _open(path)
        return [_Wanted(name, file, entry) for name, entry in read_header(file).items()]
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}.")
    places = read_index(path)
    files = {place: _open(place, f", which {path} names") for place in dict.fromkeys(places.values())}
    headers = {place: read_header(file) for place, file in files.items()}
    for name, place in places.items():
        if name not in headers[place]:
            raise ValueError(
                f"{path} says that tensor {name!r} is in {place.name}, which has {len(headers[place])} others."
            )
    return [_Wanted(name, files[place], headers[place][name]) for name, place in places.items()]


def _open(path: Path, whose: str = "") -> _C.File:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}{whose}.")
    return _C.File(str(path))


def _choose(directory: Path) -> Path:
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found[:5]) + (", ..." if len(found) > 5 else "")
            raise ValueError(f"{directory} holds {len(found)} files {pattern} ({names}); name the one to load.")
    raise FileNotFoundError(f"{directory} holds no file *.safetensors, nor an index *.safetensors.index.json.")


def _read(wanted: list[_Wanted], device: torch.device, loaded: dict[str, torch.Tensor], shown: bool | None) -> None:
    progress = Progress(sum(item.entry.nbytes for item in wanted), shown)
    # One batch is read while memory is got for the next one.
    with ThreadPoolExecutor(max_workers=1) as reader, progress:
        pending = None
        for batch in _batches(wanted):
            tensors = [torch.empty(item.entry.shape, dtype=item.entry.dtype, device=device) for item in batch]
            loaded.update(zip((item.name for item in batch), tensors, strict=True))
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
