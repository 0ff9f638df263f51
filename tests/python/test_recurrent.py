"""Recurrent layers: packed sequences and initial states."""

import pytest
import torch
from helpers import COMPUTE, grads, same
from torch import nn


@pytest.mark.memcheck
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_packed_sequence(feed):
    """The lengths are on the CPU, whatever the values are on."""

    def run(device):
        net = nn.LSTM(4, 3).to(device)
        x = torch.randn(5, 3, 4).to(device if feed == "offload" else COMPUTE).requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2])
        assert (packed.data.device.type, packed.batch_sizes.device.type) == (x.device.type, "cpu")
        out, _ = net(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out)
        assert padded.device.type == x.device.type
        padded.square().sum().backward()
        return padded, x.grad, grads(net)

    same(run)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_initial_state_of_an_rnn(feed):
    def run(device):
        net = nn.LSTM(4, 3).to(device)
        place = device if feed == "offload" else COMPUTE
        h, c = torch.randn(1, 2, 3).to(place), torch.randn(1, 2, 3).to(place)
        y, (h, c) = net(torch.randn(5, 2, 4).to(place), (h, c))
        (y.sum() + h.square().sum() + c.sum()).backward()
        return y, h, c, grads(net)

    same(run)
