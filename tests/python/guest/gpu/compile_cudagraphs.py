"""torch.compile with CUDA graphs: inference, and training forward and backward."""

import os

import torch
from bits import bits, state_bits
from torch._dynamo.utils import counters

# Inductor tunes by timing otherwise, and two runs of this program differ in their last bits.
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).cuda()
compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    torch.compiler.cudagraph_mark_step_begin()
    loss = compiled(torch.randn(32, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
with torch.inference_mode():
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        print(bits(compiled(torch.randn(32, 64, device="cuda"))))
print(state_bits(model), counters["inductor"]["cudagraph_skips"])
