"""``torch.save`` and ``torch.load``: files that open without this package."""

import torch


def _tag(storage: torch.UntypedStorage) -> str | None:
    return "cpu" if storage.device.type == "offload" else None


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if location != "offload" and not location.startswith("offload:"):
        return None
    return storage.to(device=torch.device(location))


def register() -> None:
    """Offload storages are written as the CPU's; ``map_location="offload"`` brings them back."""
    # Before PyTorch's own entry for PrivateUse1 devices, whose tag needs this package to open.
    torch.serialization.register_package(15, _tag, _restore)
