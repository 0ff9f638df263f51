"""Users' own ``torch.autograd.Function``: beside activations, their offload operands are fetched first.

Their backward returns a gradient on the activations' device, which autograd refuses for an operand on another. Fetched
outside of the function, by a differentiable operation, an offload operand is what the author assumed: a tensor
beside the others.
"""

from typing import Any

import torch
from torch.autograd import function

from torch_offload import _C


def _target(args: tuple[Any, ...]) -> torch.device | None:
    """Where the placement rule computes; None if there is nothing to fetch, or offload tensors alone."""
    devices: dict[str, torch.device] = {}
    offload = None
    for value in args:
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type == "offload":
            offload = value
        elif value.dim() > 0 and value.numel() > 0:  # checkpointing passes an empty one for its requires_grad alone
            devices.setdefault(value.device.type, value.device)
    if offload is None:
        return None
    if "cpu" in devices and "cuda" not in devices:
        paired = _C.paired_device(offload.device.index)
        return paired if paired.type == "cpu" else devices["cpu"]
    return devices.get("cuda")


def register() -> None:
    """Puts the fetch in front of every call of ``apply`` that functorch does not handle itself."""
    # Where PyTorch's own `apply` is written in Python, it handles functorch first and then asks its base.
    in_python = isinstance(function.Function.__dict__["apply"], classmethod)
    base = function._SingleLevelFunction if in_python else function.Function

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        target = _target(args)
        if target is not None:
            args = tuple(
                torch.ops.offload.fetch(value, target)
                if isinstance(value, torch.Tensor) and value.device.type == "offload"
                else value
                for value in args
            )
        return super(base, cls).apply(*args, **kwargs)

    base.apply = classmethod(apply)
