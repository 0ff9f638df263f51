"""A backward pass on a side stream: the work runs there, and nowhere else."""

import torch
from bits import bits

SLEEP = 1_000_000_000  # cycles: about half a second


class Where(torch.autograd.Function):
    """Tells on which stream its backward is called."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        print("backward on the side stream:", torch.cuda.current_stream() == side)
        return grad


default = torch.cuda.current_stream()
side = torch.cuda.Stream()
torch.manual_seed(0)
with torch.cuda.stream(side):
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    x = torch.randn(8, 64, device="cuda")
    # Allocations and libraries are warm after this.
    Where.apply(x @ weight).square().sum().backward()
torch.cuda.synchronize()

with torch.cuda.stream(side):
    weight.grad = None
    loss = Where.apply(x @ weight).square().sum()
    torch.cuda._sleep(SLEEP)
    loss.backward()
    print("default stream idle:", default.query(), "side stream idle:", side.query())
torch.cuda.synchronize()
print(bits(weight.grad))

# Forward on the side stream, backward called on the default stream: PyTorch makes the default stream wait.
with torch.cuda.stream(side):
    weight.grad = None
    loss = Where.apply(x @ weight).square().sum()
loss.backward()
print(bits(weight.grad))
