"""Checkpointing that restores CUDA's random state, and saved tensors in pinned memory."""

import torch
from bits import bits, state_bits
from torch.utils.checkpoint import checkpoint

for reentrant in (True, False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.3)) for _ in range(3))
    )
    model = model.cuda()
    x = torch.randn(8, 32, device="cuda", requires_grad=True)
    y = x
    for block in model:
        y = checkpoint(block, y, use_reentrant=reentrant)
    y.square().sum().backward()
    print(bits(x.grad), state_bits(model), bits(torch.cuda.get_rng_state()))

x = torch.randn(64, 64, device="cuda", requires_grad=True)
with torch.autograd.graph.save_on_cpu(pin_memory=True):
    y = (x @ x).softmax(-1)
y.square().sum().backward()
print(bits(x.grad))
