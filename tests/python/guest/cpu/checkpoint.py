"""Activation checkpointing and saved-tensor hooks, with dropout drawn again."""

import torch
from bits import bits, state_bits
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

for reentrant in (True, False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3)) for _ in range(4)))
    x = torch.randn(4, 8, requires_grad=True)
    y = x
    for block in model:
        y = checkpoint(block, y, use_reentrant=reentrant)
    y.square().sum().backward()
    checkpoint_sequential(model, 2, x, use_reentrant=reentrant).sum().backward()
    print(bits(x.grad), state_bits(model), bits(torch.get_rng_state()))

packed = []
x = torch.randn(4, 4, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t.clone(), lambda t: t):
    y = (x @ x).relu().softmax(-1)
y.square().sum().backward()
print(packed, bits(x.grad))
with torch.autograd.graph.save_on_cpu():
    y = (x * x).exp()
y.sum().backward()
print(bits(x.grad))
