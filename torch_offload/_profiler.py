"""Keeps the profiler's defaults what they are without this package.

A registered PrivateUse1 backend makes PyTorch list a profiler activity for it, which ``torch.profiler.profile()`` then asks
for: on a machine without a GPU it profiles a device that has nothing to show. What offload tensors enqueue is CUDA's, and is
profiled as such.
"""

import torch
from torch.profiler import ProfilerActivity


def leave_activities_alone() -> None:
    """Takes PrivateUse1 out of ``torch.profiler.supported_activities()`` and of the default activities."""
    listed = torch.autograd._supported_activities
    torch.autograd._supported_activities = lambda: listed() - {ProfilerActivity.PrivateUse1}
