"""Optimizer steps on the host: the scope that ``torch.optim`` opens around every step, and the CPU's choice of algorithm."""

from typing import Any

from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_offload import _C
from torch_offload._purposes import claim_state


class _HostScope(dict):
    """The keyword arguments of one ``step`` call, which the step's frame holds until it ends.

    A step that raises never reaches the post hook; the scope then ends when that frame is gone, with this object.
    """

    _open = False

    def enter(self) -> "_HostScope":
        _C.enter_host_scope()
        self._open = True
        return self

    def leave(self) -> None:
        if self._open:
            self._open = False
            _C.leave_host_scope()

    __del__ = leave


def _holds_offload(optimizer: Optimizer) -> bool:
    return any(
        getattr(parameter, "device", None) is not None and parameter.device.type == "offload"
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _before(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    return (args, _HostScope(kwargs).enter()) if _holds_offload(optimizer) else None


def _after(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    if isinstance(kwargs, _HostScope):
        kwargs.leave()
        claim_state(optimizer)


def _default_to_the_cpus_algorithm() -> None:
    # PyTorch takes every PrivateUse1 device for one on which list operations pay. On the host they don't: the temporaries of
    # such a step are as large as the model.
    supported = optimizer_module._get_foreach_kernels_supported_devices
    optimizer_module._get_foreach_kernels_supported_devices = lambda: [
        name for name in supported() if name != "offload"
    ]


def register() -> None:
    """Opens the scope around the steps of every optimizer that holds offload parameters."""
    _default_to_the_cpus_algorithm()
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
