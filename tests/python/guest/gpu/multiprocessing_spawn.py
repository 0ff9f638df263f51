"""A spawned process that trains on the GPU with a model from shared host memory."""

import torch
import torch.multiprocessing as mp
from bits import bits, state_bits


def train(rank, shared):
    model = torch.nn.Linear(16, 4).cuda()
    model.load_state_dict(shared.state_dict())
    torch.manual_seed(rank)
    model(torch.randn(8, 16, device="cuda")).square().mean().backward()
    print(rank, state_bits(model), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    model.share_memory()
    mp.spawn(train, (model,), nprocs=1)
    print(bits(torch.ones(3, device="cuda")))
