"""``torch.offload.memory``: snapshots and histories that PyTorch's own tools read."""

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import OFFLOAD, data, layers, passes
from torch.cuda import _memory_viz

from torch_offload.memory import _dump_snapshot, _record_memory_history, _snapshot


@pytest.fixture
def history() -> Iterator[None]:
    _record_memory_history()
    yield
    _record_memory_history(enabled=None)


def block_of(snapshot: dict[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    address = tensor.untyped_storage().data_ptr()
    (found,) = [b for s in snapshot["segments"] for b in s["blocks"] if b["address"] == address]
    return found


def check(snapshot: dict[str, Any]) -> None:
    """What the visualizer takes for granted."""
    assert set(snapshot) == {"segments", "device_traces"}
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
            assert 0 <= block["requested_size"] <= block["size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        allocated = sum(b["size"] for b in segment["blocks"] if b["state"] == "active_allocated")
        assert segment["allocated_size"] == allocated <= segment["active_size"] <= segment["total_size"]
    for entry in snapshot["device_traces"][0]:
        assert entry["action"] in ("alloc", "free_requested", "free_completed")
        assert entry["time_us"] > 0


def test_segments_are_what_is_reserved():
    gc.collect()
    tensor = torch.empty(100_000, dtype=torch.uint8, device=OFFLOAD)
    torch.offload.synchronize()
    snapshot = _snapshot()
    check(snapshot)
    stats = torch.offload.memory_stats()
    assert sum(s["total_size"] for s in snapshot["segments"]) == stats["host.reserved_bytes.current"]
    assert sum(s["total_size"] for s in snapshot["segments"] if s["is_pinned"]) == stats["host.pinned_bytes.current"]
    block = block_of(snapshot, tensor)
    assert (block["state"], block["requested_size"]) == ("active_allocated", 100_000)
    assert 100_000 <= block["size"] < 100_000 + 512
    assert [frame["name"] for frame in block["frames"]] == ["temporary"]
    assert torch.offload.memory_snapshot() == _snapshot()["segments"]


def test_blocks_tell_their_purpose():
    model = layers(1).to("offload")
    model(data(2, 8)).sum().backward()
    snapshot = _snapshot()
    check(snapshot)
    assert block_of(snapshot, model[0].weight)["frames"][0]["name"] == "parameter"


def test_a_block_that_is_gone_is_inactive_or_still_copied():
    tensor = torch.empty(3 << 20, dtype=torch.uint8, device=OFFLOAD)
    before = block_of(_snapshot(), tensor)
    del tensor
    states = {
        b["state"] for s in torch.offload.memory_snapshot() for b in s["blocks"] if b["address"] == before["address"]
    }
    assert "active_allocated" not in states
    torch.offload.synchronize()
    torch.offload.empty_cache()
    check(_snapshot())


def test_the_history_of_allocations(history):
    tensor = torch.empty(5000, dtype=torch.uint8, device=OFFLOAD)
    address = tensor.untyped_storage().data_ptr()
    module = torch.nn.Module()
    module.register_buffer("packed", tensor)
    del tensor, module
    kept = torch.empty(6000, dtype=torch.uint8, device=OFFLOAD)
    (trace,) = _snapshot()["device_traces"]
    check(_snapshot())
    mine = [entry for entry in trace if entry["addr"] == address and entry["size"] == 5000]
    assert [entry["action"] for entry in mine] == ["alloc", "free_requested", "free_completed"]
    assert {entry["frames"][0]["name"] for entry in mine} == {"parameter"}
    assert (trace[-1]["action"], trace[-1]["addr"], trace[-1]["size"]) == ("alloc", kept.data_ptr(), 6000)
    assert [entry["time_us"] for entry in trace] == sorted(entry["time_us"] for entry in trace)


def test_a_history_is_off_and_bounded():
    _record_memory_history(max_entries=3)
    for _ in range(10):
        torch.empty(600, device=OFFLOAD)
    _record_memory_history(enabled=None)
    torch.empty(700, device=OFFLOAD)
    (trace,) = _snapshot()["device_traces"]
    assert [entry["action"] for entry in trace] == [
        "free_requested",
        "free_completed",
        "alloc",
        "free_requested",
        "free_completed",
    ]
    assert {entry["size"] for entry in trace} == {2400}
    for wrong in ({"enabled": "state"}, {"max_entries": 0}):
        with pytest.raises(ValueError, match="got"):
            _record_memory_history(**wrong)


def test_pytorchs_tools_read_it(history, tmp_path):
    model = layers(2, 64).to("offload")
    optimizer = torch.optim.AdamW(model.parameters())
    large = torch.empty(45 << 20, dtype=torch.uint8, device=OFFLOAD)  # shown from 20 MiB on
    for _ in range(2):
        model(data(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    path = tmp_path / "snapshot.pickle"
    _dump_snapshot(path)
    snapshot = pickle.loads(path.read_bytes())
    check(snapshot)
    summary = _memory_viz.segsum(snapshot)  # checks the sums of sizes, too
    assert f"segments: {len(snapshot['segments'])}" in summary
    assert "[aaa]" in summary
    assert large.numel() == 45 << 20
    text = _memory_viz.trace(snapshot)
    assert text.count(" = ") == sum(entry["action"] == "alloc" for entry in snapshot["device_traces"][0])
    plain = {"format_flamegraph": lambda lines: lines}
    lines = _memory_viz.memory(snapshot, **plain)
    for purpose in ("parameter", "optimizer"):
        assert f"stream_0;active_allocated;offload:0:{purpose}" in lines
    assert _memory_viz.segments(snapshot, **plain).count("seg_") >= len(snapshot["segments"])
    assert "only_after" in _memory_viz.compare([], snapshot["segments"], **plain)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(snapshot)
    left = _memory_viz.filter_alloc_free_pairs(snapshot)["device_traces"][0]
    assert {entry["action"] for entry in left} <= {"alloc", "free_requested", "free_completed"}
    assert sum(entry["size"] for entry in left if entry["action"] == "alloc") >= 45 << 20


def test_before_anything_was_allocated():
    program = """
        import torch, torch_offload
        assert torch.offload.memory._snapshot() == {"segments": [], "device_traces": [[]]}
        assert torch.offload.memory_snapshot() == []
        assert not torch_offload._C.in_use()
    """
    passes(program)


def test_threads_train_while_histories_are_recorded():
    """PyTorch's own too, on a GPU: the context of each of its entries takes the GIL, within calls of its allocator."""
    program = """
        import faulthandler, threading, time, torch, torch_offload
        import torch._dynamo  # as an optimizer does, which takes minutes beside a thread that never rests
        faulthandler.dump_traceback_later(200, exit=True)
        cuda = torch.cuda.is_available()
        device = "cuda" if cuda else "cpu"
        histories = [torch.offload.memory, *([torch.cuda.memory] if cuda else [])]
        for memory in histories:
            memory._record_memory_history(max_entries=1000)
        torch_offload.set_budget(1 << 16)
        losses = {}

        def train(name):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(4, 64, generator=generator).to(device)
            net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
            for parameter in net.parameters():
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
            optimizer = torch.optim.SGD(net.to("offload").parameters(), lr=0.1)
            for step in range(20):
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
            losses[name] = loss.item()

        threads = [threading.Thread(target=train, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for memory in histories:
                memory._snapshot()
            torch_offload.empty_cache()
            time.sleep(0.001)  # or the others get the GIL once in every few milliseconds
        for memory in histories:
            assert any(memory._snapshot()["device_traces"])
            memory._record_memory_history(enabled=None)
        assert len(losses) == 3 and len(set(losses.values())) == 1, losses
    """
    passes(program)
