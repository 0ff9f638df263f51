"""An ``offload`` device for PyTorch: tensors live in host memory, and GPU memory is their cache.

>>> import torch, torch_offload
>>> model = torch.nn.Linear(4, 2).to("offload")  # parameters now live in (pinned) host memory
>>> loss = model(torch.ones(1, 4)).sum()  # weights stream to where the input is, as they are needed
>>> loss.backward()  # gradients stream back
>>> model.weight.grad.device
device(type='offload', index=0)

Importing the package changes nothing for a program that never says "offload".
"""

from torch_offload._version_check import load_extension

_C = load_extension()

from torch_offload import _register  # noqa: E402

_register.register(_C)

from torch_offload._saved_tensors import (  # noqa: E402
    SavedTensorsPlan,
    keep_saved_tensors,
    offload_activations,
    saved_tensors,
)
from torch_offload._scopes import on_host  # noqa: E402
from torch_offload._trace import trace  # noqa: E402
from torch_offload.io.load import load  # noqa: E402
from torch_offload.offload import (  # noqa: E402
    empty_cache,
    get_autocast_copies,
    get_budget,
    get_gpu_steps,
    get_ring_bytes,
    memory_stats,
    memory_summary,
    set_autocast_copies,
    set_budget,
    set_gpu_steps,
    set_ring_bytes,
    stats,
    synchronize,
)

__version__ = "0.1.0"

__all__ = [
    "SavedTensorsPlan",
    "empty_cache",
    "get_autocast_copies",
    "get_budget",
    "get_gpu_steps",
    "get_ring_bytes",
    "keep_saved_tensors",
    "load",
    "memory_stats",
    "memory_summary",
    "offload_activations",
    "on_host",
    "saved_tensors",
    "set_autocast_copies",
    "set_budget",
    "set_gpu_steps",
    "set_ring_bytes",
    "stats",
    "synchronize",
    "trace",
]
