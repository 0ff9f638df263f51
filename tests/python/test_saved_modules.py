"""Modules whose forward is a region of its own: ``offload_activations``."""

import gc
import weakref

import pytest
import torch
from helpers import COMPUTE, data, grads, layers, says
from saving import both_ways, cached, everything, sent_home
from torch import nn

from torch_offload import offload_activations


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers(2, 32) for _ in range(4))
        self.head = nn.Sequential(nn.Linear(32, 32), *[nn.Tanh() for _ in range(6)])
        self.fails = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.fails:
            raise ZeroDivisionError
        return self.head(x)


@cached
def test_modules_by_name():
    def sent(**options):
        """What may travel, of which some does: how much has left by the end depends on the room for copies under way."""
        may_travel = []
        net = offload_activations(
            Model().to(COMPUTE), min_bytes=0, filter=lambda x: may_travel.append(x.nbytes) or True, **options
        )
        before = sent_home()
        y = net(data(16, 32).requires_grad_().exp())
        assert (sent_home() > before) == bool(may_travel)
        y.sum().backward()
        return sum(may_travel)

    everywhere = sent()
    assert everywhere > sent(exclude="head") > sent(include="layers.?", exclude=["layers.1", "layers.2"]) > 0
    assert sent(include="*.0", exclude="") == 0
    assert sent(include="layers") == sent(include="layers.*") > 0
    assert sent(exclude="layers") == sent(include="head")
    assert sent(include="head.*", exclude="head") == 0


def test_modules_are_left_as_they_were_found():
    def run(device, region, before_backward):
        net = Model().to(device)
        if region is everything:
            offload_activations(net, min_bytes=0, include="layers.*", exclude="head")
        net.fails = True
        with pytest.raises(ZeroDivisionError):
            net(data(16, 32))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        net.fails = False
        y = net(data(16, 32))
        before_backward()
        y.sum().backward()
        return grads(net)

    both_ways(run)
    sentence = 'offload: no module of Model is named "block*"; see named_modules().'
    says(ValueError, sentence, lambda: offload_activations(Model(), include="block*"))


@cached
def test_a_module_whose_filter_knows_it_can_go():
    class Filtered(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(8, 8)
            offload_activations(self, filter=self.wanted)

        def wanted(self, tensor):
            return tensor.nbytes > 8

        def forward(self, x):
            return self.part(x)

    net = Filtered()
    net(data(3, 8).cpu()).sum().backward()
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_another_hook_fails_before_a_module_runs():
    def fail(*_):
        raise ZeroDivisionError

    net = offload_activations(nn.Linear(8, 8).to(COMPUTE), min_bytes=0)
    with everything():
        handle = torch.nn.modules.module.register_module_forward_pre_hook(fail)
        try:
            with pytest.raises(ZeroDivisionError):
                net(data(3, 8))
        finally:
            handle.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
