"""Makes ``offload`` a device of PyTorch's: its name, its module, its operations, and what surrounds them."""

import atexit
import sys
from types import ModuleType

import torch


def register(extension: ModuleType) -> None:
    """Registers the device. Called once, by the import of the package.

    Raises:
        ImportError: it can't be, and nothing has changed.
    """
    from torch_offload import (
        _autocast,
        _backward,
        _data_parallel,
        _dlpack,
        _flex_attention,
        _functions,
        _graphs,
        _guest,
        _init,
        _jagged,
        _jiterator,
        _library,
        _modules,
        _optimizer,
        _pools,
        _purposes,
        _serialization,
        _sharing,
        _triton,
        compile,
        offload,
    )

    if hasattr(torch, "offload"):
        raise ImportError(
            f"torch_offload: torch.offload exists already ({torch.offload!r}), and the device's module needs that name; "
            "import torch_offload once, and before what sets it."
        )
    extension.register_device()  # refuses, or begins
    torch.utils.rename_privateuse1_backend("offload")
    torch._register_device_module("offload", offload)
    for name in ("memory", "random"):  # for `import torch.offload.memory`
        sys.modules[f"torch.offload.{name}"] = getattr(offload, name)
    # A module's attributes are its author's: one may have a submodule, or a buffer, of that name.
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=False, for_storage=True)
    extension.intercept_operations()
    _guest.leave_defaults_alone()
    _serialization.register()
    _sharing.register()
    _optimizer.register()
    _purposes.register()
    _modules.register()
    _functions.register()
    _init.register()
    _graphs.register()
    _pools.register()
    _jiterator.register()
    _dlpack.register()
    _library.register()
    _autocast.register()
    _backward.register()
    _data_parallel.register()
    _triton.register()
    _flex_attention.register()
    _jagged.register()
    compile.register()
    # Before Python's own teardown: later a tensor's deleter may run when CUDA is gone.
    atexit.register(extension.drain, close=True)
