"""Where there is no GPU, backward runs on its caller's thread, as it does for CPU tensors.

Autograd has a thread for each device that isn't the CPU. Without a GPU the offload device reports none
(csrc/aten/device.cpp), so that a process can fork after a backward and exits cleanly; its nodes then have to run where
backward was called.
"""

from typing import Any

import torch
from torch.autograd import graph

from torch_offload import _C


def register() -> None:
    """Asks for the GPU at the first backward with offload tensors; the import must not touch CUDA, or a fork could not."""
    run = graph._engine_run_backward

    def run_on_caller(*args: Any, **kwargs: Any) -> Any:
        if not _C.in_use() or _C.backend() == "cuda" or not torch._C._is_multithreading_enabled():
            return run(*args, **kwargs)
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    graph._engine_run_backward = run_on_caller
    torch.autograd._engine_run_backward = run_on_caller
