"""Pinned memory, or what PyTorch says where there is none."""

import torch
from bits import outcome
from torch.utils.data import DataLoader

x = torch.arange(4.0)
print(x.is_pinned(), x.untyped_storage().is_pinned())
print(outcome(lambda: x.pin_memory().is_pinned()))
print(outcome(lambda: torch.empty(2, pin_memory=True).is_pinned()))
print(outcome(lambda: torch.zeros(2, pin_memory=True).is_pinned()))
# The message lists the names of all devices, where a registered backend has its own.
print(outcome(lambda: x.pin_memory("nonsense")).replace("privateuseone", "offload"))
print(outcome(lambda: x.untyped_storage().pin_memory().is_pinned()))
for workers in (0, 1):
    loader = DataLoader(x, batch_size=2, pin_memory=True, num_workers=workers)
    print(outcome(lambda loader=loader: [(batch.is_pinned(), batch.tolist()) for batch in loader]))
with torch.autograd.graph.save_on_cpu():
    y = x.requires_grad_() * x
y.sum().backward()
print(x.grad.tolist())
