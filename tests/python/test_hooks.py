"""Hooks of tensors and modules: what they see and change, optimizer steps inside backward, and hooks that raise."""

import pytest
import torch
from helpers import GPU, data, grads, layers, same


def test_hooks_of_tensors():
    def run(device):
        net = layers(2).to(device)
        seen = []
        for parameter in net.parameters():

            def hook(gradient, parameter=parameter):
                assert gradient.device == parameter.device
                seen.append(gradient.clone())
                return gradient * 2

            parameter.register_hook(hook)
        net(data(3, 8)).square().mean().backward()
        return seen, grads(net)

    same(run)


def test_hooks_of_modules():
    def run(device):
        net = layers(2).to(device)
        seen = []
        net[2].register_forward_hook(lambda m, i, o: o * 2)
        net[2].register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
        net[0].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
        net[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        net(data(3, 8)).square().mean().backward()
        return seen, grads(net)

    same(run)


# Steps whose bits are the same on every device: the offload ones are the CPU's.
EXACT = [torch.optim.SGD, torch.optim.Rprop] if GPU else [torch.optim.SGD, torch.optim.Rprop, torch.optim.AdamW]


@pytest.mark.parametrize("optimizer", EXACT)
def test_optimizer_steps_inside_backward(optimizer):
    """register_post_accumulate_grad_hook: each weight is stepped as soon as its gradient is there."""

    def run(device):
        net = layers(4).to(device)
        each = {p: optimizer([p], lr=0.5) for p in net.parameters()}

        def step(parameter):
            each[parameter].step()
            each[parameter].zero_grad()

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        losses = []
        for k in range(3):
            loss = net(data(3, 8, seed=k)).square().mean()
            loss.backward()
            losses.append(loss)
        assert all(p.grad is None for p in net.parameters())
        return losses, list(net.parameters())

    same(run)


def test_exception_in_forward():
    def run(device):
        net = layers(4).to(device)
        x = data(3, 8)
        handle = net[4].register_forward_pre_hook(lambda m, i: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(x)
        handle.remove()
        net(x).square().mean().backward()
        return grads(net)

    same(run)


def test_exception_in_backward():
    def run(device):
        net = layers(4).to(device)
        x = data(3, 8)
        handle = net[4].weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(x).square().mean().backward()
        handle.remove()
        net.zero_grad()
        net(x).square().mean().backward()
        return grads(net)

    same(run)
