"""Autocast on the CPU, its cache, and the gradient scaler."""

import torch
from bits import bits, outcome

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.LayerNorm(24), torch.nn.GELU(), torch.nn.Linear(24, 4))
x = torch.randn(8, 12)
with torch.autocast("cpu", dtype=torch.bfloat16):
    out = model(x)
    print(
        out.dtype, torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    )
out.float().square().sum().backward()
print(bits(out, *(p.grad for p in model.parameters())))

scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.zero_grad()
scaler.scale(model(x).square().mean()).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
print(scaler.get_scale(), bits(*model.parameters()))
print(outcome(lambda: torch.amp.GradScaler().is_enabled()))
print(outcome(lambda: torch.autocast("nonsense")))
