"""Streams and events of ``torch.offload``: a device without a queue, for code that asks whatever device it is given."""

import time

import pytest
import torch
from helpers import COMPUTE, GPU, OFFLOAD, assert_same, at, passes


def test_a_device_has_one_stream():
    mine = torch.offload.Stream()
    assert type(mine) is torch.Stream
    for other in (
        torch.offload.Stream("offload:0", priority=-1),
        torch.offload.Stream(0),
        torch.offload.current_stream(),
        torch.offload.current_stream("offload"),
        torch.offload.default_stream(0),
        torch.Stream(device="offload"),
        torch.Stream(device="offload:0"),
    ):
        assert isinstance(other, torch.offload.Stream)
        assert other == mine
        assert hash(other) == hash(mine)
        assert other.device == torch.device("offload:0")
    with pytest.raises(ValueError, match="no device offload:7"):
        torch.offload.Stream(7)


def test_kinds():
    """Whoever made it, what is of an offload device is a Stream or an Event of its module, and nothing else is."""
    event = torch.offload.Event()
    assert type(event) is torch.Event
    assert isinstance(event, torch.offload.Event)
    assert isinstance(torch.offload.Stream().record_event(), torch.offload.Event)
    assert not isinstance(event, torch.offload.Stream)
    assert not isinstance(torch.offload.Stream(), torch.offload.Event)
    for kind in (torch.offload.Stream, torch.offload.Event):
        assert not isinstance(torch.Stream(device="cpu"), kind)
        assert not isinstance(None, kind)
    assert issubclass(torch.offload.Stream, torch.Stream)
    assert not issubclass(torch.Stream, torch.offload.Stream)


def everything(stream):
    event = stream.record_event()
    stream.wait_event(event)
    stream.wait_stream(torch.offload.Stream())
    event.wait(stream)
    event.wait()
    event.synchronize()
    stream.synchronize()
    return event.query(), stream.query()


def test_what_a_stream_is_asked_for():
    weight = at(OFFLOAD, 8, 8)
    before = torch.offload.current_stream()
    with torch.offload.stream(torch.offload.Stream()) as context:
        assert context is None
        result = at(COMPUTE, 4, 8) @ weight
        assert everything(torch.offload.current_stream()) == (True, True)
        weight.record_stream(torch.offload.current_stream())
    with torch.offload.stream(None), torch.Stream(device="offload"):
        assert everything(torch.offload.default_stream()) == (True, True)
    torch.offload.set_stream(torch.offload.Stream())
    torch.offload.set_stream(None)
    assert torch.offload.current_stream() == before
    assert_same(result, at(COMPUTE, 4, 8) @ at(COMPUTE, 8, 8))


def test_a_side_stream_as_for_any_device():
    """A pattern of code that does not know its device: copies on a stream of its own, which the computation waits for."""
    module = torch.get_device_module(OFFLOAD)
    values = [at("cpu", 16, seed=seed) for seed in range(3)]
    side, events, copies = module.Stream(), [], []
    for value in values:
        side.wait_stream(module.current_stream())
        with module.stream(side):
            copies.append(value.to(OFFLOAD, non_blocking=True))
            event = module.Event()
            event.record(side)
            events.append(event)
    for event in events:
        module.current_stream().wait_event(event)
    home = [copy.to("cpu", non_blocking=True) for copy in copies]
    side.synchronize()
    assert_same(home, values)


@pytest.mark.parametrize(
    "use", [torch.offload.stream, torch.offload.set_stream, torch.offload.StreamContext], ids=lambda use: use.__name__
)
def test_streams_of_other_devices_are_refused(use):
    with pytest.raises(ValueError, match="expected a stream of an offload device and got one of cpu"):
        use(torch.Stream(device="cpu"))
    with pytest.raises(TypeError, match="and got str"):
        use("offload")


@pytest.mark.skipif(GPU, reason="the host computes")
def test_elapsed_time():
    start, end = (torch.offload.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    time.sleep(0.05)
    end.record(torch.offload.current_stream())
    most = 1000 * (time.perf_counter() - began)
    end.synchronize()
    assert (start.query(), end.query()) == (True, True)
    assert 50 <= start.elapsed_time(end) <= most
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    start.record()  # again, which is later than the end now
    assert start.elapsed_time(end) < 0


@pytest.mark.gpu
def test_elapsed_time_is_that_of_the_gpu():
    """As CUDA's own events measure it, on the stream that computes."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        start, end = (torch.offload.Event(enable_timing=True) for _ in range(2))
        mine, yours = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        mine.record()
        start.record()
        torch.cuda._sleep(200_000_000)
        end.record()
        assert not end.query()
        with pytest.raises(RuntimeError, match="must be completed"):
            start.elapsed_time(end)
        yours.record()
    end.synchronize()
    assert end.query()
    yours.synchronize()
    assert 20 < start.elapsed_time(end) <= mine.elapsed_time(yours)


@pytest.mark.gpu
def test_another_stream_waits_for_an_event_that_measures_time():
    weight = at(OFFLOAD, 64, 64)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.offload.Event(enable_timing=True)
    with torch.cuda.stream(one):
        torch.cuda._sleep(200_000_000)
        result = at(COMPUTE, 4, 64) @ weight
        event.record()
    with torch.cuda.stream(two):
        event.wait()
        copy = result.clone()
    two.synchronize()
    assert event.query()
    assert_same(copy, at(COMPUTE, 4, 64) @ at(COMPUTE, 64, 64))


def test_events_without_a_time():
    one, two = torch.offload.Event(), torch.offload.Event(enable_timing=True)
    one.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        one.elapsed_time(two)
    with pytest.raises(ValueError, match="must be recorded"):
        torch.offload.Event(enable_timing=True).elapsed_time(two)
    with pytest.raises(NotImplementedError, match="ipc"):
        one.ipc_handle()


WAITS = {
    "device": "torch.offload.synchronize()",
    "stream": "torch.offload.current_stream().synchronize()",
    "event": "torch.offload.current_stream().record_event().synchronize()",
    "event with a time": "event = torch.offload.Event(enable_timing=True); event.record(); event.synchronize()",
}


@pytest.mark.parametrize("wait", WAITS)
def test_synchronizing_waits_for_the_copies(wait):
    """Whoever reads host memory by its address, which nothing guards, finds the gradient that has been copied home."""
    passes(
        f"""
        import ctypes, torch, torch_offload
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for _ in range(10):
            w = torch.full((256, 256), 2.0, device="offload").requires_grad_()
            (torch.ones(4, 256, device=device) @ w).sum().backward()
            {WAITS[wait]}
            assert ctypes.c_float.from_address(w.grad.data_ptr()).value == 4
        """,
        TORCH_OFFLOAD_LINK="auto" if GPU else "sim",
        TORCH_OFFLOAD_COPY_DELAY_US="2000",
        TORCH_OFFLOAD_POISON="1",
    )


def test_capturing():
    assert not torch.offload.is_current_stream_capturing()


@pytest.mark.gpu
def test_capturing_a_graph_of_cuda():
    graph = torch.cuda.CUDAGraph()
    value = torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        value.add_(1)
        inside = torch.offload.is_current_stream_capturing()
    assert inside
    assert not torch.offload.is_current_stream_capturing()
