"""What the package's operations give while they are traced: shapes, strides and devices, without memory."""

import torch

from torch_offload.compile import partition


def _stash(self: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(self, device=device)


def _fetch(self: torch.Tensor, device: torch.device) -> torch.Tensor:
    partition.prepare_graphs()
    # Where the CPU computes, its index stands for the cache; what is fetched is a CPU tensor like any other.
    target = torch.device("cpu") if device.type == "cpu" else device
    return torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=target)


def _fetch_aligned(self: torch.Tensor, device: torch.device, *, alignment: int) -> torch.Tensor:
    return _fetch(self, device)


def _write(self: torch.Tensor, value: torch.Tensor) -> None:
    return None


def register() -> None:
    """Tells ``torch.library``. They have to be Python: PyTorch lets one in C++ work on one device only."""
    torch.library.register_fake("offload::fetch", _fetch)
    torch.library.register_fake("offload::fetch.aligned", _fetch_aligned)
    torch.library.register_fake("offload::stash", _stash)
    torch.library.register_fake("offload::give", _stash)
    torch.library.register_fake("offload::write_", _write)
