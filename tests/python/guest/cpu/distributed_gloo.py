"""DDP and collectives in a process group of one, over gloo."""

import os
import tempfile

import torch
import torch.distributed as dist
from bits import bits, outcome, state_bits
from torch.nn.parallel import DistributedDataParallel

with tempfile.TemporaryDirectory() as folder:
    store = dist.FileStore(os.path.join(folder, "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(dist.get_backend(), dist.get_backend_config())
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    print(state_bits(model))
    tensor = torch.arange(4.0)
    dist.all_reduce(tensor)
    print(bits(tensor), outcome(lambda: dist.all_reduce(torch.ones(1, device="meta"))))
    dist.destroy_process_group()
print(outcome(lambda: dist.BackendConfig(dist.Backend("undefined"))))
print(outcome(lambda: dist.get_default_backend_for_device("cpu")))
