"""``DistributedDataParallel`` hears of gradients by hooks that parameters lose where they are moved to another device.

PyTorch then has each process train by itself, and says nothing. Of a model that has been moved to offload, one sentence does.
"""

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_offload import _C


def register() -> None:
    """Refuses a forward pass whose gradients would not be reduced."""
    pre_forward = DistributedDataParallel._pre_forward

    @functools.wraps(pre_forward)
    def refuse_moved(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        in_use = torch.compiler.is_dynamo_compiling() or _C.in_use()
        trained = (parameter.device.type for parameter in self._module_parameters if parameter.requires_grad)
        if in_use and torch.is_grad_enabled() and self.device.type != "offload" and "offload" in trained:
            raise RuntimeError(
                "offload: DistributedDataParallel does not reduce gradients of parameters that were moved to offload after it "
                "was made, and each process would train by itself; leave them on the CPU or on CUDA."
            )
        return pre_forward(self, *inputs, **kwargs)

    DistributedDataParallel._pre_forward = refuse_moved
