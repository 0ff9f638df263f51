"""DataParallel, which picks the device by itself."""

import torch
from bits import bits

torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
parallel = torch.nn.DataParallel(model)
x = torch.randn(4, 6)
parallel(x.to(next(model.parameters()).device)).sum().backward()
print(parallel.device_ids, next(parallel.parameters()).device, bits(model.weight, model.weight.grad))
