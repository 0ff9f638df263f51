"""Files, pickles, copies and moves of what is on two devices: each stays on its own."""

import copy
import io
import pickle

import pytest
import torch
from helpers import assert_same, at, data, grads, layers
from two_devices import HOMES, needs_two_devices, nothing_is_left  # noqa: F401

pytestmark = needs_two_devices


def test_save_and_load():
    net = torch.nn.ModuleList(layers(1).to(home) for home in HOMES)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)

    def load(to):
        file.seek(0)
        return torch.load(file, map_location=to)

    for to in ("offload:1", {"cpu": "offload:1"}, HOMES[1], lambda storage, _: storage.to(device="offload:1")):
        loaded = load(to)
        assert {value.device for value in loaded.values()} == {HOMES[1]}
        assert_same(loaded, net.state_dict())
    with torch.offload.device(1):
        assert {value.device for value in load("offload").values()} == {HOMES[1]}
    other = torch.nn.ModuleList(layers(1).to(home) for home in reversed(HOMES))
    other.load_state_dict(net.state_dict())
    assert [p.device for p in other.parameters()] == [p.device for p in net.parameters()][::-1]
    assert_same(dict(other.named_parameters()), dict(net.named_parameters()))
    other.load_state_dict(load("offload:1"), assign=True)
    assert {p.device for p in other.parameters()} == {HOMES[1]}


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_pickles_and_copies_keep_the_device(again):
    values = {home: at(home, 4, 4) @ at(home, 4, 4) for home in HOMES}
    for home in HOMES:
        value = again(values[home])
        assert value.device == home
        assert_same(value, values[home])


def test_a_module_moves_from_the_one_to_the_other():
    net = layers(2).to(HOMES[0])
    parameters = list(net.parameters())
    expected = [p.detach().clone() for p in parameters]
    x = data(4, 8)
    net(x).sum().backward()
    gradients = copy.deepcopy(grads(net))
    net.to(HOMES[1])
    assert all(p is q for p, q in zip(net.parameters(), parameters, strict=True))
    assert {p.device for p in net.parameters()} == {HOMES[1]}
    assert_same([p.detach() for p in net.parameters()], expected)
    assert_same(grads(net), gradients)
    net.zero_grad()
    net(x).sum().backward()
    assert_same(grads(net), gradients)


def test_generators():
    assert [generator.device for generator in torch.offload.default_generators[:2]] == HOMES
    drawn = [torch.randn(4, device=home, generator=torch.Generator(home).manual_seed(3)) for home in HOMES]
    assert_same(drawn[0], drawn[1])
    states = torch.offload.get_rng_state_all()
    assert len(states) == torch.offload.device_count()
    first = [torch.nn.functional.dropout(torch.ones(64, device=home)) for home in HOMES]
    torch.offload.set_rng_state_all(states)
    assert_same([torch.nn.functional.dropout(torch.ones(64, device=home)) for home in HOMES], first)
