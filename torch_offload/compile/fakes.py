"""What the package's operations give while they are traced: shapes, strides and devices, without memory."""

import torch

from torch_offload.compile import partition


def computing(device: torch.device) -> torch.device:
    """Where a fetched value is. Where the CPU computes, its index stands for the cache, of which only a fetch knows."""
    return torch.device("cpu") if device.type == "cpu" else device


_TYPES = ("cpu", "cuda")  # by c10::DeviceType


def code_of(device: torch.device) -> tuple[int, int]:
    """A device that computes, as generated code names it; no index is -1."""
    return _TYPES.index(device.type), -1 if device.index is None else device.index


def device_of(type: int, index: int) -> torch.device:
    return torch.device(_TYPES[type], None if index < 0 else index)


def _check_dense(self: torch.Tensor) -> None:
    if self.layout is not torch.strided:
        raise NotImplementedError(
            f"offload: a tensor of shape {list(self.shape)} and layout {self.layout} can't be traced on its way to or from "
            "offload; make it dense with .to_dense(), or keep the operation out of the graph."
        )


def _stash(self: torch.Tensor, device: torch.device) -> torch.Tensor:
    _check_dense(self)
    return torch.empty_like(self, device=device)


def _fetch(self: torch.Tensor, device: torch.device) -> torch.Tensor:
    _check_dense(self)
    partition.prepare_graphs()
    return torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=computing(device))


def _stash_coded(self: torch.Tensor, index: int) -> torch.Tensor:
    return _stash(self, torch.device("offload", index))


def _fetch_coded(self: torch.Tensor, type: int, index: int, alignment: int) -> torch.Tensor:
    return _fetch(self, device_of(type, index))


def _look_up(self: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return self.new_empty((*index.shape, *self.shape[1:]), device=index.device)


def _write(self: torch.Tensor, value: torch.Tensor) -> None:
    return None


def register() -> None:
    """Tells ``torch.library``. They have to be Python: PyTorch lets one in C++ work on one device only."""
    torch.library.register_fake("offload::fetch", _fetch)
    torch.library.register_fake("offload::fetch.coded", _fetch_coded)
    torch.library.register_fake("offload::stash", _stash)
    torch.library.register_fake("offload::stash.coded", _stash_coded)
    torch.library.register_fake("offload::give", _stash)
    torch.library.register_fake("offload::give.coded", _stash_coded)
    torch.library.register_fake("offload::look_up", _look_up)
    torch.library.register_fake("offload::write_", _write)
