"""Scopes that say where operations on offload tensors run."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch_offload import _C


@contextmanager
def on_host() -> Iterator[None]:
    """Within it, operations of this thread on offload tensors alone run on the CPU, in place on the host bytes.

    Without it a new value (``w.norm()``, ``a @ b``) is made on the GPU that ``offload:i`` is paired with. Operations that also
    take CUDA tensors are not affected. ``Optimizer.step()`` runs within such a scope by itself. May be nested and used as a
    decorator.

    Source: the placement rule, docs/design/placement.md.
    """
    _C.enter_host_scope()
    try:
        yield
    finally:
        _C.leave_host_scope()
