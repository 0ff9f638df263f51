"""vmap, forward mode, and Jacobians."""

import torch
from bits import bits
from torch.func import functional_call, grad, hessian, jvp, vmap

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
parameters = dict(model.named_parameters())
x = torch.randn(3, 4)


def loss(parameters, row):
    return functional_call(model, parameters, (row,)).square().sum()


print(bits(*vmap(grad(loss), (None, 0))(parameters, x).values()))
print(bits(hessian(lambda row: loss(parameters, row))(x[0])))
print(bits(*jvp(lambda row: model(row), (x,), (torch.ones_like(x),))))
print(bits(torch.autograd.functional.jacobian(model, x)))
print(torch.autograd.gradcheck(torch.nn.functional.gelu, torch.randn(4, dtype=torch.float64, requires_grad=True)))
