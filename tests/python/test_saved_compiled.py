"""``torch_offload.saved_tensors`` around compiled programs."""

import contextlib

import pytest
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401 - a fixture
from helpers import CACHED, COMPUTE, assert_same, data, grads, layers
from saving import both_ways, cached, everything, held, sent_home
from torch import nn

import torch_offload
from torch_offload import offload_activations


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layerwise", [False, True])
def test_compiled(backend, layerwise):
    gone, models = [], {}

    def model(device):
        if device not in models:
            net = nn.Sequential(*[layers(2, 8) for _ in range(3)]).to(device)
            whole = nn.Sequential(*[compiled(layer, backend) for layer in net]) if layerwise else compiled(net, backend)
            models[device] = net, whole
        return models[device]

    def run(device, region, before_backward):
        net, whole = model(device)
        net.zero_grad()
        x, sent = data(16, 8).requires_grad_(), sent_home()
        with region():
            y = whole(x).square().sum()
        gone.append(sent_home() - sent)
        before_backward()
        y.backward()
        return y, x.grad, grads(net)

    both_ways(run)
    if CACHED:
        assert gone[1] >= 4 * 16 * 8 * 4


@cached
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_is_all_that_runs_in_a_region(backend):
    """So nothing is saved after what it saves; but the last of that, up to half of the ring, stays."""
    net, x = nn.Sequential(*[layers(1, 64) for _ in range(8)]).to(COMPUTE), data(64, 64).requires_grad_()
    ring, made, gone = torch_offload.get_ring_bytes(), [], []
    torch_offload.set_ring_bytes(8 * x.nbytes)
    try:
        for region in (contextlib.nullcontext, everything):
            model = compiled(net, backend)
            net.zero_grad()
            before, was_held = sent_home(), held()
            with region():
                y = model(x)
            gone.append(sent_home() - before)
            y.square().sum().backward()
            made.append(grads(net))
            del y
            assert held() == was_held
    finally:
        torch_offload.set_ring_bytes(ring)
    assert_same(made[1], made[0])
    assert gone[0] == 0
    assert gone[1] >= 3 * x.nbytes


@cached
def test_modules_of_a_compiled_model():
    """Each compiled by itself, as PyTorch recommends for repeated blocks."""
    net = nn.Sequential(*[layers(2, 8) for _ in range(3)]).to(COMPUTE)
    x = data(16, 8).requires_grad_()
    net(x).square().sum().backward()
    expected = grads(net)
    net.zero_grad()
    for layer in net:
        layer.compile(backend="aot_eager")
    offload_activations(net, min_bytes=0, include="?")
    before = sent_home()
    loss = net(x).square().sum()
    assert sent_home() - before >= 4 * 16 * 8 * 4
    loss.backward()
    assert_same(grads(net), expected)
