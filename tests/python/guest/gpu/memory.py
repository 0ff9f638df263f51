"""The CUDA caching allocator's account of a training step, and what running out of memory says."""

import re

import torch
from bits import outcome

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(256, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
stats = torch.cuda.memory_stats()
for key in (
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "allocation.all.allocated",
    "segment.all.allocated",
):
    print(key, stats[key])
torch.cuda.memory._record_memory_history(stacks="python", max_entries=100)
kept = torch.empty(3 << 20, device="cuda")
snapshot = torch.cuda.memory_snapshot()
print(len(snapshot), sum(segment["allocated_size"] for segment in snapshot))
torch.cuda.memory._record_memory_history(enabled=None)

torch.cuda.set_per_process_memory_fraction(0.05)
message = outcome(lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda"))
# Free memory and process ids are the machine's, not the program's.
print(message.split(":")[0], re.findall(r"Tried to allocate [\d.]+ \w+", message))
print(torch.cuda.memory_stats()["num_ooms"], torch.ones(3, device="cuda").sum().item())
