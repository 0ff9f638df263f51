"""torch.compile with inductor: fused forward and backward, and dynamic shapes."""

import os

import torch
from bits import bits, state_bits

# Inductor tunes by timing otherwise, and two runs of this program differ in their last bits.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.GELU(), torch.nn.Linear(96, 8)
).cuda()
compiled = torch.compile(model, fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for rows in (16, 16, 24, 40):
    loss = compiled(torch.randn(rows, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
print(state_bits(model), torch._dynamo.utils.counters["stats"]["unique_graphs"])


@torch.compile(dynamic=True)
def noisy(x):
    return torch.nn.functional.dropout(x.sin(), 0.3) + torch.rand_like(x)


print(bits(noisy(torch.arange(100.0, device="cuda")), noisy(torch.arange(90.0, device="cuda"))))
