"""DDP over NCCL in a process group of one, with no_sync and a collective on a side stream."""

import os
import tempfile

import torch
import torch.distributed as dist
from bits import bits, outcome, state_bits
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
torch.cuda.set_device(0)
with tempfile.TemporaryDirectory() as folder:
    store = dist.FileStore(os.path.join(folder, "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    print(dist.get_backend(), dist.get_backend_config(), outcome(lambda: dist.get_default_backend_for_device("cuda")))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).cuda()
    model = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        model(torch.randn(16, 32, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.no_sync():
        model(torch.randn(16, 32, device="cuda")).square().mean().backward()
    print(state_bits(model))
    tensor = torch.arange(8.0, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
    torch.cuda.synchronize()
    gathered = [torch.empty_like(tensor)]
    dist.all_gather(gathered, tensor)
    print(bits(tensor, *gathered))
    dist.destroy_process_group()
