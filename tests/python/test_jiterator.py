"""Kernels of torch.cuda.jiterator with offload operands; without a GPU a function stands for one, behind the same guard."""

import pytest
import torch
from helpers import COMPUTE, GPU, HOST, OFFLOAD, assert_same, at, data

from torch_offload import _jiterator

CODE = "template <typename T> T scaled_sum(T x, T y, T alpha) { return alpha * x + y; }"
PAIR = "template <typename T> void sum_and_product(T x, T y, T& s, T& p) { s = x + y; p = x * y; }"


def kernels():
    """A kernel with one result and one with two."""
    if GPU:
        return (
            torch.cuda.jiterator._create_jit_fn(CODE, alpha=1.0),
            torch.cuda.jiterator._create_multi_output_jit_fn(PAIR, num_outputs=2),
        )

    class Kernel:
        def __init__(self, function):
            self.function = function

        def __call__(self, *tensors, **kwargs):
            assert {value.device.type for value in tensors} <= {COMPUTE.type}, "nothing else is fetched"
            return self.function(*tensors, **kwargs)

    Kernel.__call__ = _jiterator._guarded(Kernel.__call__)
    return Kernel(lambda x, y, alpha=1.0: alpha * x + y), Kernel(lambda x, y: (x + y, x * y))


@pytest.mark.skipif(HOST, reason="no kernel runs here")
@pytest.mark.parametrize(
    "operands",
    [
        lambda: (at(OFFLOAD, 4, 8), at(OFFLOAD, 4, 8, seed=1)),
        lambda: (data(4, 8), at(OFFLOAD, 4, 8, seed=1)),
        lambda: (at(OFFLOAD, 4, 8), data(4, 8, seed=1)),
        lambda: (at(OFFLOAD, 8, 4).t(), data(8, seed=1)),
        lambda: (data(4, 8), data(8, seed=1)),
        lambda: (at(OFFLOAD, 4, 8), data(1, seed=1)[0]),
        lambda: (at(OFFLOAD, 1)[0], data(1, seed=1)[0]),
        lambda: (at(OFFLOAD, 0, 8), data(0, 8)),
    ],
    ids=["all on offload", "second", "first", "a view", "none", "beside 0-dim", "0-dim beside 0-dim", "empty"],
)
def test_results_and_where_they_live(operands):
    scaled_sum, both = kernels()
    x, y = operands()
    where = (x + y).device
    plain = x.to(COMPUTE), y.to(COMPUTE)
    result = scaled_sum(x, y, alpha=3.0)
    assert result.device.type == where.type
    assert_same(result, scaled_sum(*plain, alpha=3.0))
    results = both(x, y)
    assert [value.device.type for value in results] == [where.type] * 2
    assert_same(list(results), list(both(*plain)))


@pytest.mark.skipif(GPU, reason="there is a GPU")
@pytest.mark.parametrize("device", ["cpu", "offload"])
def test_without_a_gpu_it_says_what_it_says_of_plain_tensors(device):
    with pytest.raises(AssertionError, match="only supported on CUDA"):
        torch.cuda.jiterator._create_jit_fn(CODE, alpha=1.0)(*[torch.ones(2).to(device)] * 2)
