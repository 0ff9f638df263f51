"""Scopes that say where operations on offload tensors run."""

from contextlib import ContextDecorator

from torch_offload import _C


# Entering and leaving are calls of C, between which and the `with` no KeyboardInterrupt comes: what was opened is closed.
class on_host(_C.HostScope, ContextDecorator):  # noqa: N801 - named as torch.no_grad is
    """Within it, operations of this thread on offload tensors alone run on the CPU, in place on the host bytes.

    Without it a new value (``w.norm()``, ``a @ b``) is made on the GPU that ``offload:i`` is paired with. Operations that also
    take CUDA tensors are not affected. ``Optimizer.step()`` runs within such a scope by itself. May be nested and used as a
    decorator.

    Source: the placement rule, docs/design/placement.md.
    """
