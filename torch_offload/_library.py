"""Operations that are defined after the import are intercepted like those before.

A definition from Python, and an extension that is loaded by ``torch.ops``, is followed at once; what an imported extension
defines, at the next operation on an offload tensor.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_offload import _C


def _then_catch_up(define: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(define)
    def define_and_catch_up(*args: Any, **kwargs: Any) -> Any:
        result = define(*args, **kwargs)
        # Until an offload tensor is made there is nobody to serve; then all are caught up with.
        if _C.in_use():
            _C.intercept_operations()
        return result

    return define_and_catch_up


def register() -> None:
    """Follows ``torch.library`` and ``torch.ops.load_library``."""
    torch.library.Library.define = _then_catch_up(torch.library.Library.define)
    operations = type(torch.ops)
    operations.load_library = _then_catch_up(operations.load_library)
