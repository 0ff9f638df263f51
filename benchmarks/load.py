"""GiB/s from a safetensors file: into host memory, and from the file to the GPU, beside plain reads.

The file holds blocks of the Llama-3-8B shape in bfloat16 (5.2 GB), in the folder that --folder names. It is read from the page
cache first, and then from the disk: each time after its pages were dropped from the cache (which a file system in memory can't
do, and which other readers of the disk disturb). What is compared:

    read              one thread reads the file into one buffer, which has been used before
    load              torch_offload.load into page-locked memory that the Arena has kept
    load, new memory  the same where the memory must be got from the system and page-locked
    safetensors       load_file of that package and .to("offload"), where it is installed; memory that the Arena has kept
    fetch, in memory  every tensor goes to the GPU once, from page-locked memory: what the link allows
    fetch, mmap       the same for load(mmap=True): the file is read into the ring when a tensor is fetched
    load(mmap=True)   only that call, as bytes that it makes available a second

The exit status is 1 if a tensor has other bytes than were written.
"""

import json
import os
import struct
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from blocks import LLAMA_8B, TINY, make_blocks
from harness import Step, arguments, compute_device, equal, link_rates, measure, print_table, write_record

import torch_offload

Tensors = dict[str, torch.Tensor]


def write_file(path: Path, tensors: Tensors) -> int:
    """Writes bfloat16 tensors as safetensors to the disk; the file's bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def drop_from_cache(path: Path) -> None:
    """Asks the system to forget the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def fetch_all(tensors: Tensors, device: torch.device) -> None:
    """Brings every tensor to the device once, and keeps none."""
    for tensor in tensors.values():
        tensor.to(device)


def plain_loader(path: Path) -> Step | None:
    """safetensors' own way to the offload device; None where it isn't installed."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        return None
    return lambda: {name: tensor.to("offload") for name, tensor in load_file(path).items()}


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--folder", help="where the file is written (default: the system's folder for temporary files)")
    options = parser.parse_args()
    device = compute_device(options.tiny)
    rounds = 2 if options.tiny else options.rounds
    torch_offload.set_budget(0)
    shape, count = (TINY, 3) if options.tiny else (LLAMA_8B, 12)
    written = {
        name: value.cpu() for name, value in make_blocks(count, shape, torch.bfloat16, device).state_dict().items()
    }
    rates = link_rates(options.tiny)
    records, differ = [], False
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "blocks.safetensors"
        size = write_file(path, written)
        buffer = bytearray(size)

        def read() -> None:
            with path.open("rb", buffering=0) as file:
                done = 0
                while done < size:
                    done += file.readinto(memoryview(buffer)[done:])

        in_file = torch_offload.load(path, mmap=True)
        in_memory = torch_offload.load(path)
        for loaded in (in_file, in_memory):
            differ = differ or not all(equal(loaded[name].to(device), value) for name, value in written.items())
        del written
        variants = {
            "read": read,
            "load": lambda: torch_offload.load(path),
            "load, new memory": lambda: torch_offload.load(path),
            "safetensors": plain_loader(path),
            "fetch, in memory": lambda: fetch_all(in_memory, device),
            "fetch, mmap": lambda: fetch_all(in_file, device),
            "load(mmap=True)": lambda: torch_offload.load(path, mmap=True),
        }
        variants = {name: step for name, step in variants.items() if step is not None}

        def before(name: str, cold: bool) -> Step:
            def prepare() -> None:
                if name == "load, new memory":
                    torch_offload.empty_cache()
                if cold:
                    drop_from_cache(path)

            return prepare

        for source in ("page cache", "disk"):
            prepare = {name: before(name, source == "disk") for name in variants}
            times = measure(variants, rounds, warmup=1, prepare=prepare)
            print(f"\n{count} blocks, {size / 1e9:.3f} GB, from the {source}; {rates}")
            rows = [
                [name, f"{size / time.median / 2**30:.2f}", f"{time.median * 1e3:.1f}", f"{time.least * 1e3:.1f}"]
                for name, time in times.items()
            ]
            print_table(["from the file", "GiB/s", "median ms", "least ms"], rows)
            records += [
                {"source": source, "variant": name, "bytes": size, "seconds": vars(time)}
                for name, time in times.items()
            ]
    write_record("load", {"link": vars(rates), "runs": records, "equal": not differ})
    if differ:
        raise SystemExit("a loaded tensor has other bytes than were written.")


if __name__ == "__main__":
    main()
