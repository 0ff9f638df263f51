"""``ExportedProgram.run_decompositions()``: composite operations are fetched for as they are anywhere.

PyTorch puts a Python kernel of its own in front of each composite operation, for every backend that it knows by name. That
takes the operation apart, or keeps it whole, below autograd, where nothing fetches. Offload is left out of these names: so the
generic kernel fetches first, and what follows are the kernels of the device that computes.
"""

from types import ModuleType

from torch._C import DispatchKey

from torch_offload._imports import when_imported


def _leave_out_offload(exported_program: ModuleType) -> None:
    for name, key in (
        ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", DispatchKey.AutogradPrivateUse1),
        ("_BACKEND_KEYS_TO_OVERRIDE", DispatchKey.PrivateUse1),
    ):
        keys = getattr(exported_program, name, [])
        if key in keys:
            keys.remove(key)


def register() -> None:
    """Now, or when a program imports ``torch.export``."""
    when_imported("torch.export.exported_program", _leave_out_offload)
