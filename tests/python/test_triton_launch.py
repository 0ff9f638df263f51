"""Raw launches of Triton kernels with offload arguments: what they write comes home, and views of one storage stay that.

Where there is no GPU, a function stands for the kernel, behind the same guard and with the simulated link.
"""

import functools
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, HOST, OFFLOAD, assert_same, at, data, passes

import torch_offload
from torch_offload import _triton

needs_cache = pytest.mark.skipif(HOST, reason="no kernel runs here")


class Kernel:
    """What a launch calls; it keeps what it was given."""

    def __init__(self, function):
        self.function = function

    def run(self, *args, grid, warmup, **kwargs):
        self.given = args, kwargs
        if not warmup:
            self.function(*args, **kwargs)
        return "launched"

    def __getitem__(self, grid):
        guarded = _triton._guarded(type(self).run)
        return functools.partial(guarded, self, grid=grid, warmup=False)


def add(x, y, out, n=None):
    out.copy_(x + y)


@needs_cache
def test_results_come_home():
    kernel = Kernel(add)
    x, y, out = at(OFFLOAD, 8), data(8), torch.zeros(8, device=OFFLOAD)
    assert kernel[(1,)](x, y, out, n=8) == "launched"
    given, named = kernel.given
    assert [value.device.type for value in given] == [COMPUTE.type] * 3
    assert given[1] is y
    assert named == {"n": 8}
    assert_same(out, x.cpu() + y.cpu())
    assert_same(x, at("cpu", 8))


@needs_cache
def test_the_next_operation_sees_what_a_kernel_wrote():
    weight, x = at(OFFLOAD, 4, 4), data(2, 4)
    before = F.linear(x, weight)
    Kernel(lambda w: w.mul_(2))[(1,)](weight)
    assert_same(F.linear(x, weight), before * 2)
    assert_same(weight, at("cpu", 4, 4) * 2)


@needs_cache
def test_views_of_one_storage_stay_that():
    def shift(first, second, flat):
        assert first.data_ptr() == flat.data_ptr()
        assert second.data_ptr() == flat.data_ptr() + 4 * flat.element_size()
        first.add_(1)
        flat.mul_(3)

    whole = at(OFFLOAD, 3, 4)
    expected = at("cpu", 3, 4)
    kernel = Kernel(shift)
    kernel[(1,)](whole.t(), whole[1], whole.view(-1))
    assert kernel.given[0][0].stride() == whole.t().stride()
    assert_same(whole, (expected + 1) * 3)


@needs_cache
def test_arguments_by_name_in_tuples_and_of_other_dtypes():
    def run(pair, out, codes):
        out.copy_(pair[0] * pair[1] + codes)

    x, y = at(OFFLOAD, 6), at(OFFLOAD, 6, seed=1)
    out, codes = torch.zeros(6, device=OFFLOAD), torch.arange(6, dtype=torch.uint8, device=OFFLOAD)
    Kernel(run)[(1,)]((x, y), out=out, codes=codes)
    assert_same(out, at("cpu", 6) * at("cpu", 6, seed=1) + torch.arange(6, dtype=torch.uint8))


@needs_cache
def test_leaves_that_require_gradients_and_empty_tensors():
    weight, nothing = at(OFFLOAD, 4).requires_grad_(), torch.zeros(0, device=OFFLOAD)
    Kernel(lambda w, n: w.fill_(7))[(1,)](weight, nothing)
    assert_same(weight.detach(), torch.full((4,), 7.0))
    assert weight.requires_grad
    assert weight.is_leaf


@needs_cache
def test_a_kernel_that_fails_leaves_everything_as_it_was():
    def fail(x):
        x.zero_()
        raise ValueError("no")

    x = at(OFFLOAD, 4)
    with pytest.raises(ValueError, match="no"):
        Kernel(fail)[(1,)](x)
    assert_same(x, at("cpu", 4))


def test_other_launches_are_as_they_were():
    kernel = Kernel(add)
    x, out = data(3), torch.zeros(3, device=COMPUTE)
    kernel[(1,)](x, x, out)
    assert kernel.given[0][0] is x
    assert kernel.given[0][2] is out
    assert_same(out, x * 2)


@pytest.mark.skipif(not HOST, reason="there is a device that computes")
def test_without_a_device_triton_speaks_for_itself():
    kernel = Kernel(lambda x: None)
    x = at(OFFLOAD, 3)
    kernel[(1,)](x)
    assert kernel.given[0][0] is x


@pytest.mark.parametrize("imports", ["torch, torch_offload, triton", "torch, triton, torch_offload"])
def test_the_guard_is_there_whoever_comes_first(imports):
    pytest.importorskip("triton")
    passes(
        f"""
        import {imports}
        from triton.runtime.jit import JITFunction
        assert JITFunction.run.__wrapped__.__module__ == "triton.runtime.jit"
        assert not hasattr(JITFunction.run.__wrapped__, "__wrapped__")
        """
    )


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """A module with a kernel, as Triton reads its source from a file."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "scaled.py").write_text(
        "import triton\n"
        "import triton.language as tl\n\n\n"
        "@triton.jit\n"
        "def scale(x, weight, out, count, size: tl.constexpr):\n"
        "    k = tl.program_id(0) * size + tl.arange(0, size)\n"
        "    inside = k < count\n"
        "    tl.store(out + k, tl.load(x + k, inside) * tl.load(weight + k, inside), inside)\n\n\n"
        "tuned = triton.autotune([triton.Config({'size': size}) for size in (64, 256)], ['count'])(scale)\n"
    )
    spec = importlib.util.spec_from_file_location("scaled", tmp_path / "scaled.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("tuned", [False, True])
def test_a_real_kernel(tuned, scaled):
    x, weight, out = data(1000), at(OFFLOAD, 1000, seed=1).requires_grad_(), torch.zeros(1000, device=OFFLOAD)
    if tuned:
        scaled.tuned[lambda given: (-(-1000 // given["size"]),)](x, weight, out, 1000)
    else:
        scaled.scale[(8,)](x, weight, out, 1000, size=128)
    assert_same(out, x * weight.detach().to(COMPUTE))
    assert_same(weight.detach(), at("cpu", 1000, seed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_behind_an_operation(compiled, scaled):
    """Of ``torch.library.triton_op``: the weight travels there, and nothing comes home."""

    @torch.library.triton_op("offload_test::scaled", mutates_args=())
    def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(scaled.scale)[(8,)](x, weight, out, x.numel(), size=128)
        return out

    call = torch.compile(scale, fullgraph=True) if compiled else scale
    x, weight = data(1000), at(OFFLOAD, 1000, seed=1)
    torch_offload.synchronize()
    before = torch_offload.memory_stats()["link.bytes_to_host"]
    result = call(x, weight)
    assert result.device == x.device
    assert_same(result, x * weight.to(COMPUTE))
    assert torch_offload.memory_stats()["link.bytes_to_host"] == before
    assert_same(call(x.to(OFFLOAD), weight), result.to(OFFLOAD))
