"""Makes ``offload`` a device of PyTorch's: its name, its module, its operations, and what surrounds them."""

import atexit
from types import ModuleType

import torch


def register(extension: ModuleType) -> None:
    """Registers the device. Called once, by the import of the package."""
    from torch_offload import (
        _autocast,
        _backward,
        _functions,
        _guest,
        _init,
        _library,
        _names,
        _optimizer,
        _purposes,
        _serialization,
        _sharing,
        device,
    )

    torch.utils.rename_privateuse1_backend("offload")
    torch._register_device_module("offload", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    extension.correct_accelerator()
    extension.intercept_operations()
    _guest.leave_defaults_alone()
    _serialization.register()
    _sharing.register()
    _optimizer.register()
    _purposes.register()
    _names.register()
    _functions.register()
    _init.register()
    _library.register()
    _autocast.register()
    _backward.register()
    # Before Python's own teardown: later a tensor's deleter may run when CUDA is gone.
    atexit.register(extension.drain, close=True)
