"""``torch.save`` and ``torch.load``: files that open without this package."""

import torch


def _tag(storage: torch.UntypedStorage) -> str | None:
    return "cpu" if storage.device.type == "offload" else None


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if location != "offload" and not location.startswith("offload:"):
        return None
    return storage.to(device=torch.device(location))


def _refuse_sharing() -> None:
    # PyTorch takes memory of every PrivateUse1 device for memory that other processes can open, and would do nothing.
    share = torch.UntypedStorage.share_memory_

    def share_memory_(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type == "offload":
            raise RuntimeError(
                f"offload: the {self.nbytes()} bytes of this tensor on {self.device} can't be shared between processes; share "
                "the CPU tensor, and let each process move its own to offload."
            )
        return share(self)

    torch.UntypedStorage.share_memory_ = share_memory_


def register() -> None:
    """Offload storages are written as the CPU's; ``map_location="offload"`` brings them back."""
    _refuse_sharing()
    # Before PyTorch's own entry for PrivateUse1 devices, whose tag needs this package to open.
    torch.serialization.register_package(15, _tag, _restore)
