"""CUDA in a forked child: possible as long as the parent has not used it."""

import os

import torch
from bits import outcome


def square() -> list[float]:
    return (torch.arange(3.0, device="cuda") ** 2).tolist()


print(torch.cuda.is_initialized(), flush=True)
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        print("child", outcome(square), flush=True)
        os._exit(0)
    print("status", os.waitpid(pid, 0)[1], flush=True)
    print("parent", square(), flush=True)
