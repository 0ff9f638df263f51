"""fully_shard over a mesh of one GPU, with mixed precision and CPU offload."""

import os
import tempfile

import torch
import torch.distributed as dist
from bits import bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
torch.cuda.set_device(0)
with tempfile.TemporaryDirectory() as folder:
    store = dist.FileStore(os.path.join(folder, "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    mesh = init_device_mesh("cuda", (1,))
    for offload in (OffloadPolicy(), CPUOffloadPolicy()):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()) for _ in range(3)))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            loss = model(torch.randn(8, 32, device="cuda")).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex())
        print(next(model.parameters()).device, bits(*(p.to_local() for p in model.parameters())))
    dist.destroy_process_group()
