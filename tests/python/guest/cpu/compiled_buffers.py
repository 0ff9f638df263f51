"""Modules that set their tensors while they are compiled."""

import torch
from bits import bits
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        self.state = self.state.tanh() + x
        self.register_buffer("last", x + 1, persistent=False)
        return self.state * 2


module = Recurrent()
step = torch.compile(module, backend="eager", fullgraph=True)
for k in range(3):
    print(bits(step(torch.full((4,), float(k))), module.state, module.last))
