"""Users' own ``torch.autograd.Function``: beside activations, their offload operands are fetched first.

Their backward returns a gradient on the activations' device, which autograd refuses for an operand on another. Fetched
outside of the function, by a differentiable operation, an offload operand is what the author assumed: a tensor
beside the others.
"""

from typing import Any

from torch.autograd import function

from torch_offload._wrappers import fetched, target_of


def register() -> None:
    """Puts the fetch in front of every call of ``apply`` that functorch does not handle itself."""
    # Where PyTorch's own `apply` is written in Python, it handles functorch first and then asks its base.
    in_python = isinstance(function.Function.__dict__["apply"], classmethod)
    base = function._SingleLevelFunction if in_python else function.Function

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Compiled graphs and functorch's levels fetch by themselves. A user's function in a graph that is traced does not.
        compiled = cls.__module__.startswith("torch._functorch._aot_autograd.")
        target = target_of(args) if issubclass(cls, function.Function) and not compiled else None
        if target is not None:
            args = tuple(fetched(value, target) for value in args)
        return super(base, cls).apply(*args, **kwargs)

    base.apply = classmethod(apply)
