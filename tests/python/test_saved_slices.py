"""``torch_offload.saved_tensors``: of a storage that is mostly not saved, what is saved travels."""

import os

import pytest
import torch
from helpers import assert_same, data
from saving import both_ways, cached, everything, held, sent_home, stats

import torch_offload
from torch_offload import saved_tensors

ROW = 256 * 4  # bytes


SLICES = {
    "rows": (lambda h: [h[8:10]], 2 * ROW),
    "one row": (lambda h: [h[-1]], ROW),
    "rows that are far apart": (lambda h: [h[4:5], h[7:8]], 4 * ROW),
    "the later one first": (lambda h: [h[7:8], h[4:5], h[5, :3]], 4 * ROW),
    "a column of some rows": (lambda h: [h[2:6, :1]], 3 * ROW + 4),
    "what begins anywhere": (lambda h: [h.flatten()[70:80]], 24 + 10 * 4),
    "an empty one too": (lambda h: [h[60:60], h[8:10], h[63:63]], 2 * ROW),
    "other dtypes": (lambda h: [torch.view_as_complex(h.view(64, 128, 2))[8:10].real, h[9]], 2 * ROW),
    "transposed": (lambda h: [h.t()[:, 8:10]], 2 * ROW),
    "all": (lambda h: [h[:1], h[-1:]], 64 * ROW),
}


@pytest.mark.parametrize("empty", [False, True], ids=["found in the cache", "copied back"])
@pytest.mark.parametrize("kind", SLICES)
def test_values(kind, empty):
    def run(device, region, before_backward):
        x = data(64, 256).requires_grad_()
        with region():
            y = [part.sin() for part in SLICES[kind][0](x + 0.0)]
            x.sum().exp()
        before_backward()
        sum(part.sum() for part in y).backward()
        return y, x.grad

    both_ways(run, empty=empty)


@cached
@pytest.mark.parametrize("kind", SLICES)
def test_only_its_bytes_travel(kind):
    slices, expected = SLICES[kind]
    x, was_held = data(64, 256).requires_grad_(), held()
    before = sent_home()
    with everything():
        y = sum(part.sin().sum() for part in slices(x + 0.0))
        x.sum().exp()
    assert sent_home() - before == expected
    assert held() - was_held == expected
    fetched = stats("link.bytes_to_device")
    if "TORCH_OFFLOAD_EVICT" not in os.environ:
        y.backward()
        assert stats("link.bytes_to_device") == fetched  # it is still on the device
    del y
    assert held() == was_held


@cached
def test_what_is_saved_of_a_slice_later_still_counts():
    """The storage is held by `h` until the second of its slices has been saved."""
    x = data(64, 256).requires_grad_()
    before = sent_home()
    with everything():
        h = x + 0.0
        y = h[8:9].sin().sum()
        x.sum().exp()
        assert sent_home() == before
        y = y + h[11:12].cos().sum()
        del h
        x.sum().exp()
    assert sent_home() - before == 4 * ROW
    y.backward()
    expected = torch.zeros_like(x)
    expected[8], expected[11] = x.detach()[8].cos(), -x.detach()[11].sin()
    assert_same(x.grad, expected)


@cached
def test_limits_count_what_travels():
    x = data(64, 256).requires_grad_()

    def sent(**options):
        before = sent_home()
        with everything(**options):
            y = (x + 0.0)[8:10].sin().sum()
            x.sum().exp()
        gone = sent_home() - before
        y.backward()
        return gone

    assert sent(max_host_bytes=2 * ROW) == 2 * ROW
    with pytest.warns(UserWarning, match="those on the host may take 2047 bytes, and take 0 now"):
        assert sent(max_host_bytes=2 * ROW - 1) == 0
    assert sent(keep_bytes=64 * ROW - 1) == 2 * ROW  # of device memory
    assert sent(keep_bytes=64 * ROW) == 0


@pytest.mark.gpu
def test_device_memory_is_let_go():
    """Of each of 40 results the last row is saved, as by a model whose head reads the last token."""
    x, ring = data(8192, 256).requires_grad_(), torch_offload.get_ring_bytes()  # 8 MiB
    torch_offload.set_ring_bytes(16 << 20)
    try:
        torch_offload.empty_cache()
        before, was_held = torch.cuda.memory_allocated(), held()
        with saved_tensors():
            y = sum((x + k)[-1].sin().sum() for k in range(40))
            assert torch.cuda.memory_allocated() - before <= (16 + 3 * 8 + 1) << 20
        assert 38 * ROW <= held() - was_held <= 40 * ROW
        y.backward()
    finally:
        torch_offload.set_ring_bytes(ring)
    expected = torch.zeros_like(x)
    expected[-1] = sum((x.detach()[-1] + k).cos() for k in range(40))
    torch.testing.assert_close(x.grad, expected)


def test_written_to_beside_the_slice():
    """PyTorch counts writes of a whole storage."""
    x = data(64, 256).requires_grad_()
    with everything():
        h = x + 0.0
        y = h[8:10].sin().sum()
        with torch.no_grad():
            h[20:30].mul_(2)
        del h
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        y.backward()


@cached
def test_a_storage_that_was_shorter_once_stays():
    """As long as it was, no slice of it is all that was saved."""

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h.new_zeros(())

        @staticmethod
        def backward(ctx, g):
            (h,) = ctx.saved_tensors
            return g * h

    def run(device, region, before_backward):
        parameters = [data(4, seed=k).requires_grad_() for k in range(100)]
        x = data(64, 256).requires_grad_()
        with region():
            z = sum(p.sin().sum() for p in parameters)  # so that it takes a while until it is looked at
            h = x + 0.0
            y = h[8:10].sin().sum()
            torch.ops.inductor.resize_storage_bytes_(h.detach(), ROW)
            y = y + Keep.apply(h)
            torch.ops.inductor.resize_storage_bytes_(h.detach(), 64 * ROW)
            h.data.copy_(x.data)
            del h
            z = z + sum(p.sin().sum() for p in parameters)
        before_backward()
        (y + z).backward()
        return x.grad

    both_ways(run)
