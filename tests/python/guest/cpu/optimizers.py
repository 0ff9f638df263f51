"""Optimizers, schedulers and gradient clipping; the default choice between loops, foreach and fused."""

import torch
from bits import bits
from torch import optim
from torch.optim.optimizer import _default_to_fused_or_foreach

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3),
}

for name, build in OPTIMIZERS.items():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    optimizer = build(model.parameters())
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    x = torch.randn(8, 6)

    def closure(model=model, optimizer=optimizer, x=x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        loss = optimizer.step(closure)
        schedule.step()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    states = [s for state in optimizer.state_dict()["state"].values() for s in state.values() if torch.is_tensor(s)]
    print(name, loss.item().hex(), norm.item().hex(), bits(*model.parameters(), *states))

print(_default_to_fused_or_foreach([torch.ones(2)], differentiable=False))
