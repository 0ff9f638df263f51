"""Threads that train on streams of their own, and one whose backward is called from another thread."""

import threading

import torch
from bits import bits

results = [""] * 4


def train(rank: int) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        generator = torch.Generator("cuda").manual_seed(rank)
        weight = torch.randn(64, 64, device="cuda", generator=generator, requires_grad=True)
        for _ in range(10):
            x = torch.randn(16, 64, device="cuda", generator=generator)
            (x @ weight).tanh().square().sum().backward()
            with torch.no_grad():
                weight -= 0.01 * weight.grad
        results[rank] = bits(weight, weight.grad)


threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*results)

torch.manual_seed(0)
x = torch.randn(32, 32, device="cuda", requires_grad=True)
loss = (x @ x).square().sum()
thread = threading.Thread(target=loss.backward)
thread.start()
thread.join()
print(bits(x.grad))
