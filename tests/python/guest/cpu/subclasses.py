"""What subclasses and modes see of the calls that the package wraps."""

import pickle

import torch
from bits import outcome
from torch.overrides import TorchFunctionMode

HANDLED = {}


class Strict(torch.Tensor):
    """Knows the functions of a list alone, as "Extending PyTorch" has it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return HANDLED[function](*args, **(kwargs or {})) if function in HANDLED else NotImplemented


class Elsewhere(torch.Tensor):
    device = "of its own"


class Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.ones(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Counts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls = getattr(self, "calls", 0) + 1
        return function(*args, **(kwargs or {}))


def calls(action):
    with Counts() as counts:
        action()
    return counts.calls


HANDLED[torch.Tensor.__dlpack__] = lambda x, **_: "a capsule"
strict = torch.ones(2).as_subclass(Strict)
elsewhere = torch.ones(2, 2).as_subclass(Elsewhere)
print(outcome(lambda: Ones.apply(strict).sum()), outcome(strict.__dlpack__))
print(outcome(lambda: Ones.apply(elsewhere).sum()))
print(outcome(lambda: type(torch.nn.init.orthogonal_(elsewhere))))
print(outcome(lambda: torch.nn.init.orthogonal_([1])))
print(outcome(lambda: torch.utils.dlpack.to_dlpack(3)))


def step(parameter):
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["params"] = [parameter]
    return optimizer.step()


print(outcome(lambda: step(elsewhere)))


def restored(state):
    module = torch.nn.Module.__new__(torch.nn.Module)
    module.__setstate__(state)
    return sorted(vars(module))


state = vars(torch.nn.Linear(2, 2)).copy()
state["_parameters"] = {"strict": strict}
print(outcome(lambda: restored(state)))
print(outcome(lambda: restored({"of": "a class's own"})))

weight = torch.ones(2, requires_grad=True)
weight.grad = torch.ones(2)
optimizer = torch.optim.SGD([weight], lr=0.1)
linear = torch.nn.Linear(2, 2)
print(calls(lambda: Ones.apply(weight)), calls(optimizer.step), calls(linear.double))
print(calls(lambda: pickle.dumps(torch.ones(2))))
