"""DataParallel, gather, scatter and copies between devices, on as many GPUs as there are."""

import torch
from bits import bits
from torch.nn.parallel import comm

torch.manual_seed(0)
model = torch.nn.Linear(16, 4).cuda()
parallel = torch.nn.DataParallel(model)
x = torch.randn(8, 16)
parallel(x.cuda()).sum().backward()
print(len(parallel.device_ids) == torch.cuda.device_count(), bits(model.weight, model.weight.grad))
pieces = comm.scatter(x, range(torch.cuda.device_count()))
print(bits(comm.gather(pieces, destination=0)), comm.gather(pieces, destination="cpu").device)
