"""A script whose last statement is a backward pass through Python code, with objects left to the interpreter's exit."""

import atexit

import torch
from bits import bits

atexit.register(lambda: print(bits(kept.grad)))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


kept = torch.arange(4.0, requires_grad=True)
pending = Square.apply(kept * 3)
pending.sum().backward()
