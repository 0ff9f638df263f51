"""Bare device indices: ``x.to(0)`` means the accelerator."""

import torch
from bits import outcome

x = torch.ones(2)
print(outcome(lambda: torch.device(0)))
print(outcome(lambda: x.to(0).device))
print(outcome(lambda: torch.zeros(1, device=0).device))
print(outcome(lambda: torch.nn.Linear(2, 2).to(0).weight.device))
print(outcome(lambda: x.cuda().device))
print(outcome(lambda: x.to("cuda").device))
print(outcome(lambda: x.to("xpu").device))
print(outcome(lambda: x.to("nonsense").device))
print(outcome(lambda: (x + torch.ones(2, device="meta")).device))
print(outcome(lambda: x.get_device()), x.is_cuda, x.is_cpu)
