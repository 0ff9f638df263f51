"""What of the device a compiled function may ask."""

import pytest
import torch
from compiling import compiled, fresh_compiler  # noqa: F401
from helpers import OFFLOAD, assert_same, at, data


def asks_its_module(x, w):
    return x @ w * torch.get_device_module("offload").device_count()


def asks_what_there_is(x, w):
    return x @ w * (torch.offload.device_count() if torch.offload.is_available() else 0)


def asks_for_bf16(x, w):
    return x @ w * (1 if torch.offload.is_bf16_supported() else 2)


def asks_the_accelerator(x, w):
    return x @ w + (torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0)


@pytest.mark.parametrize(
    "function", [asks_its_module, asks_what_there_is, asks_for_bf16, asks_the_accelerator], ids=lambda f: f.__name__
)
def test_what_a_graph_may_ask_of_the_device(function):
    x, w = data(2, 4), at(OFFLOAD, 4, 4)
    assert_same(compiled(function, "aot_eager")(x, w), function(x, w))


def waits(x, w):
    y = x @ w
    torch.offload.synchronize()
    return y + 1


def asks_where_it_is(x, w):
    return x @ w + torch.offload.current_device()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("function", [waits, asks_where_it_is], ids=lambda f: f.__name__)
def test_what_breaks_a_graph_is_right(function):
    x, w = data(2, 4), at(OFFLOAD, 4, 4)
    torch.compiler.reset()
    assert_same(torch.compile(function, backend="aot_eager")(x, w), function(x, w))
