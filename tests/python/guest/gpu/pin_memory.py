"""Pinned memory: tensors, storages, views, and asynchronous copies from and to it."""

import torch
from bits import bits, outcome

x = torch.arange(1 << 16, dtype=torch.float32)
pinned = x.pin_memory()
print(x.is_pinned(), pinned.is_pinned(), pinned[3:].is_pinned(), pinned.untyped_storage().is_pinned(), pinned.device)
print(
    torch.empty(4, pin_memory=True).is_pinned(),
    torch.zeros_like(x, pin_memory=True).is_pinned(),
    pinned.clone().is_pinned(),
)
print(pinned.pin_memory() is pinned, outcome(lambda: x.cuda().pin_memory()))
device = pinned.to("cuda", non_blocking=True)
back = device.to("cpu", non_blocking=True)
torch.cuda.synchronize()
print(back.is_pinned(), bits(device, back))
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    staged = torch.empty_like(x, pin_memory=True).copy_(device * 2, non_blocking=True)
stream.synchronize()
print(bits(staged))
