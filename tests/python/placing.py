"""Operands that were born on the host or on the device, and the bytes that work on them moves over the link."""

import torch
from helpers import CPU, OFFLOAD, at

import torch_offload

SIZE = 16
BYTES = 4 * SIZE * SIZE
NOTHING = (0, 0, 0)


def crossed(run):
    """What a call moves over the link: bytes down, bytes home, and in how many copies these went home."""

    def moved():
        torch_offload.synchronize()
        stats = torch_offload.memory_stats()
        return [stats[f"link.{name}"] for name in ("bytes_to_device", "bytes_to_host", "copies_to_host")]

    before = moved()
    run()
    return tuple(new - old for new, old in zip(moved(), before, strict=True))


def place(tensor, born):
    """On offload, and made there by arithmetic if it is to be born on the device."""
    tensor = tensor.to(OFFLOAD)
    if born == "host":
        return tensor
    return tensor | tensor if tensor.dtype == torch.bool else tensor * 1


def operands(born, device=OFFLOAD):
    """Two tensors of numbers, rows in another order, and a mask."""
    rows = torch.arange(SIZE).flip(0) * 5 % SIZE
    made = [at(CPU, SIZE, SIZE), at(CPU, SIZE, SIZE, seed=1), rows, at(CPU, SIZE, SIZE, seed=2) > 0]
    return [place(tensor, born) if device == OFFLOAD else tensor.to(device) for tensor in made]
