"""Backward passes from several threads, on models of their own and on one shared model."""

import threading

import torch
from bits import bits

torch.set_num_threads(1)
shared = torch.nn.Linear(8, 8)
torch.nn.init.constant_(shared.weight, 0.5)
results = [""] * 4

# What BLAS finds out at its first call it may find out differently in several threads at once.
warm = torch.ones(16, 16, requires_grad=True)
(torch.ones(4, 16) @ warm).sum().backward()


def train(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn(16, 16, generator=generator, requires_grad=True)
    for _ in range(10):
        x = torch.randn(4, 16, generator=generator)
        (x @ weight).tanh().square().sum().backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
    # Sums of small integers are exact, whatever the order of the threads.
    shared(torch.full((2, 8), float(rank + 1))).sum().backward()
    results[rank] = bits(weight, weight.grad)


threads = [threading.Thread(target=train, args=(rank,)) for rank in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*results, bits(shared.weight.grad))


class Inner(torch.autograd.Function):
    """Calls backward inside backward, from the engine's own thread."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (y * y).sum().backward()
        return grad * y.grad


x = torch.arange(5.0, requires_grad=True)
Inner.apply(Inner.apply(x)).sum().backward()
print(bits(x.grad))
