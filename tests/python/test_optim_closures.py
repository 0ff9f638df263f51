"""Steps that are given closures, and steps that take something else."""

import pytest
import torch
from helpers import OFFLOAD, assert_same, data
from torch import nn

import torch_offload
from torch_offload import _C


def model():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def test_a_closure_computes_where_a_loop_does():
    """And the step goes on on the host."""
    scopes = []

    def trained(step):
        torch.manual_seed(0)
        net = model().to(OFFLOAD)
        x = data(4, 5, device=OFFLOAD)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def closure():
            scopes.append(_C.HostScope.active())
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            step(optimizer, closure)
        return [parameter.detach() for parameter in net.parameters()]

    def as_a_loop(optimizer, closure):
        closure()
        optimizer.step()

    expected = trained(as_a_loop)
    assert_same(trained(lambda optimizer, closure: optimizer.step(closure)), expected)
    assert_same(trained(lambda optimizer, closure: optimizer.step(closure=closure)), expected)
    assert not any(scopes)
    with torch_offload.on_host():
        trained(lambda optimizer, closure: optimizer.step(closure))
        assert _C.HostScope.active()
    assert all(scopes[-3:])
    assert not _C.HostScope.active()


def test_a_closure_that_is_called_after_its_step():
    class Keeps(torch.optim.SGD):
        def step(self, closure):
            self.kept = closure

    optimizer = Keeps([nn.Parameter(data(3, device=OFFLOAD))], lr=0.1)
    optimizer.step(lambda: _C.HostScope.active())
    assert not optimizer.kept()
    assert not _C.HostScope.active()


def test_a_step_that_takes_something_else():
    class Copies(torch.optim.SGD):
        def step(self, net):
            for group in self.param_groups:
                for parameter, source in zip(group["params"], net.parameters(), strict=True):
                    parameter.data.copy_(source)

    leaf, net = nn.Parameter(data(1, 3, device=OFFLOAD)), nn.Linear(3, 1, bias=False)
    Copies([leaf], lr=0.1).step(net)
    torch.testing.assert_close(leaf.detach().cpu(), net.weight.detach())


def test_a_step_whose_signature_is_not_known():
    class Compiled(torch.optim.SGD):
        step = vars  # a function of C that tells no signature

    optimizer = Compiled([nn.Parameter(data(3, device=OFFLOAD))], lr=0.1)
    assert optimizer.step() is vars(optimizer)

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            return _C.HostScope.active(), closure()

        step.__signature__ = 3  # which is none

    optimizer = Odd([nn.Parameter(data(3, device=OFFLOAD))], lr=0.1)
    assert optimizer.step(closure=_C.HostScope.active) == (True, False)
    assert not _C.HostScope.active()


def test_a_closure_that_fails_leaves_nothing_behind():
    weight = nn.Parameter(data(3, device=OFFLOAD))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure():
        raise KeyError("no")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert not _C.HostScope.active()
    with torch_offload.on_host():
        with pytest.raises(KeyError):
            optimizer.step(closure)
        assert _C.HostScope.active()
