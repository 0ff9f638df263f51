"""Gradients through single operations on offload tensors: views, indexing, arithmetic, writes in place and copies."""

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, OFFLOAD, data, grads, same
from torch import nn


def test_views_of_a_weight():
    def run(device):
        weight = data(8, 8, device=device).requires_grad_()
        x = data(3, 4)
        y = x @ weight[:4].t()[:4] + (x * weight[1, ::2]) + x * weight.diagonal()[4:]
        q, k = weight.chunk(2)
        y = y + x @ q[:, :4] + x @ k.narrow(1, 2, 4)
        y.square().sum().backward()
        return y, weight.grad

    same(run)


def test_slices_that_overlap():
    def run(device):
        w = data(10, 8, device=device).requires_grad_()
        x = data(3, 8)
        h = sum((x @ w[k : k + 5].t()).tanh() for k in range(6))
        h.square().sum().backward()
        return h, w.grad

    same(run)


def test_gradients_through_where_and_indexing_of_weights():
    def run(device):
        table = data(9, 8, device=device).requires_grad_()
        index = torch.tensor([1, 3, 1, 8]).to(COMPUTE)
        x = data(4, 8)
        y = (
            torch.where(x > 0, table[index] * x, table[0])
            + table.index_select(0, index)
            + table.gather(0, index[:, None])
        )
        y.square().sum().backward()
        return y, table.grad

    same(run)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_sums_of_gradients_with_gaps(feed):
    """Attention sinks: a column that is the same for all rows. The order in which its gradient is added up is the strides'."""

    def run(device):
        sinks = data(53, 1, device=device).requires_grad_()
        scores = data(7, 53, 101).to(device if feed == "offload" else COMPUTE)
        y = torch.cat([scores, sinks.expand(7, 53, 2)[..., 1:], sinks.expand(7, 53, 1)], -1)
        y = torch.stack([y, sinks.expand(7, 53, 103)], -1)
        y.softmax(-2).square().sum().backward()
        return y, sinks.grad

    same(run)


@pytest.mark.parametrize(("width", "expected"), [(256, (320, 1)), (2, (3, 1))])
def test_rows_of_a_gradient_with_gaps_are_aligned_as_they_were(width, expected):
    """Of 768 elements, which is a multiple of 256 bytes. Short ones would take many times their bytes."""
    x = data(6, width, device=OFFLOAD).requires_grad_()
    h = x * 1
    strides = []
    h.register_hook(lambda gradient: strides.append(gradient.stride()))
    torch.cat([h, data(6, 768 - width, device=OFFLOAD)], 1).square().sum().backward()
    assert strides == [expected]
    torch.testing.assert_close(x.grad.cpu(), 2 * x.detach().cpu())


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_sums_of_gradients_that_repeat_one_value(feed):
    def run(device):
        bias = data(53, 1, device=device).requires_grad_()
        x = data(7, 53, 101).to(device if feed == "offload" else COMPUTE)
        y = x + bias.expand(7, 53, 101)
        y.mean().backward()
        return y, bias.grad

    same(run)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_part_of_a_gradient_picks_the_algorithm(feed):
    """Batch norm's backward has another one for a gradient that isn't contiguous, as that of concatenated channels."""

    def run(device):
        norm = nn.BatchNorm2d(5).to(device)
        x = data(7, 5, 11, 11).to(device if feed == "offload" else COMPUTE).requires_grad_()
        y = torch.cat([norm(x), x[:, :2]], 1)
        (y * data(*y.shape, seed=2).to(y.device)).sum().backward()
        return y, x.grad, grads(norm)

    same(run)


def test_arithmetic_between_offload_tensors():
    def run(device):
        a = data(6, 6, device=device).requires_grad_()
        b = data(6, 6, device=device, seed=1).requires_grad_()
        y = ((a @ b).softmax(-1) * a.exp() + b.t()).sum()
        assert y.device.type == device.type
        y.backward()
        return y, a.grad, b.grad

    same(run)


def test_in_place_on_the_way():
    def run(device):
        layer = nn.Linear(8, 8).to(device)
        bias = data(8, device=device).requires_grad_()
        h = layer(data(3, 8))
        h.add_(bias)
        h.mul_(bias)
        h.relu_()
        h.square().sum().backward()
        return h, bias.grad, grads(layer)

    same(run)


def test_in_place_between_offload_tensors_with_a_gradient():
    def run(device):
        weight = data(8, 8, device=device).requires_grad_()
        scale = data(8, device=device, seed=1).requires_grad_()
        work = weight.clone()
        work.mul_(scale)
        work[2:4] = scale
        work.t().add_(scale)
        y = F.linear(data(3, 8), work)
        y.square().sum().backward()
        return work, y, weight.grad, scale.grad

    same(run)


def test_plain_tensor_written_into_an_offload_one():
    def run(device):
        target = torch.zeros(4, 8, device=device)
        source = data(8).requires_grad_()
        target[1] = source
        target[2:].copy_(source.expand(2, 8))
        (target * 2).sum().backward()
        assert source.grad.device == COMPUTE
        return target, source.grad

    same(run)


def test_to_and_back_is_differentiable():
    def run(device):
        x = data(3, 8).requires_grad_()
        y = x.to(device).to(COMPUTE).to(device, torch.float64).to(COMPUTE)
        y.square().sum().backward()
        assert x.grad.device == COMPUTE
        return y, x.grad

    same(run)
