"""Three steps of AdamW of a model of some library: on offload and on the plain device, every bit compared."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from helpers import COMPUTE, CPU, OFFLOAD, grads, same, values
from torch import nn

STEPS = 3


class AdamW(torch.optim.AdamW):
    """PyTorch's; what is on another device than offload is stepped on the CPU, as the truth to compare with."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.device.type != "offload"]
        homes = [p.device for p in parameters]
        move(parameters, [CPU] * len(parameters))
        for averages in self.state.values():  # those of a file came where the parameters are
            averages.update({name: value.to(CPU) for name, value in averages.items() if name.startswith("exp_avg")})
        loss = super().step(closure)
        move(parameters, homes)
        return loss


def move(parameters: Iterable[nn.Parameter], devices: Iterable[torch.device]) -> None:
    """Values and gradients; the parameters stay the same objects."""
    for parameter, device in zip(parameters, devices, strict=True):
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(device)
        parameter.grad = gradient if gradient is None else gradient.to(device)


def adamw(model: nn.Module) -> AdamW:
    """AdamW of what is trained. The default's least denominator is zero in fp16."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return AdamW(parameters, lr=0.01, eps=1e-4 if parameters[0].dtype == torch.float16 else 1e-8)


def train(
    model: nn.Module,
    inputs: Callable[[], Any],
    loss_of: Callable[..., torch.Tensor],
    place: torch.device,
    steps: int = STEPS,
) -> list[Any]:
    """What every step computes: its loss, all gradients, and all parameters and buffers after it."""
    optimizer = adamw(model)
    results = []
    for step in range(steps):
        xs = [x.to(place) for x in inputs()]
        torch.manual_seed(step)  # dropout draws where it computes
        loss = loss_of(model, *xs)
        assert loss.device.type == place.type
        model.zero_grad()
        loss.backward()
        found = {name: g if g is None else g.cpu() for name, g in grads(model).items()}
        optimizer.step()
        results.append((loss.detach().cpu(), found, state(model)))
    return results


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {name: value.detach().cpu().clone() for name, value in values(model).items()}


def check_training(
    make: Callable[[], nn.Module],
    inputs: Callable[[], Any],
    loss_of: Callable[..., torch.Tensor],
    feed: str = "plain",
    steps: int = STEPS,
) -> nn.Module:
    """Inputs are where the model computes, or on offload as it is; returns the model that was trained on offload."""
    models = {}

    def run(device: torch.device) -> Any:
        models[device] = model = make().to(device)
        assert {p.device.type for p in values(model).values()} <= {device.type}
        return train(model, inputs, loss_of, device if feed == "offload" else COMPUTE, steps)

    results = same(run)
    losses = [loss.item() for loss, _, _ in results]
    assert all(map(math.isfinite, losses)), losses
    assert any(g is not None and g.any() for g in results[0][1].values())
    return models[OFFLOAD]
