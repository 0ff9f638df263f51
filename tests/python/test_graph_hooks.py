"""How captures and replays of CUDA graphs are followed, over classes that play PyTorch's and core's parts."""

from types import SimpleNamespace

import pytest

from torch_offload import _graphs


class Fetches:
    def __init__(self, log):
        self.log, self.tensors = log, 1

    def end(self):
        self.log.append("fetches end")

    def replay(self, launch):
        self.log.append("before")
        try:
            launch()
        finally:
            self.log.append("after")


@pytest.fixture
def graphs(monkeypatch):
    """A class of graphs, what happens to them, and which of the next calls fail."""
    log, failing = [], set()

    def happens(name):
        if name in failing:
            failing.remove(name)
            raise RuntimeError(name)
        log.append(name)

    def method(name):
        return lambda self, *args, **kwargs: happens(name)

    def made(device):
        happens("fetches begin")
        return Fetches(log)

    names = ("capture_begin", "capture_end", "replay", "reset")
    base = type("Base", (), {"__slots__": (), **{name: method(name) for name in names}})
    _graphs.follow(base)
    monkeypatch.setattr(_graphs, "_C", SimpleNamespace(captures_graphs=lambda: True, CapturedGraph=made))
    monkeypatch.setattr(_graphs.torch.cuda, "current_device", lambda: 0)
    return SimpleNamespace(new=type("Graph", (base,), {}), base=base, log=log, failing=failing)


def captured(graphs):
    graph = graphs.new()
    graph.capture_begin()
    graph.capture_end()
    graphs.log.clear()
    return graph


def test_a_capture_and_a_replay(graphs):
    graph = graphs.new()
    graph.capture_begin()
    graph.capture_end()
    graph.replay()
    expected = ["capture_begin", "fetches begin", "capture_end", "fetches end", "before", "replay", "after"]
    assert graphs.log == expected


def test_a_launch_that_fails_has_ended(graphs):
    graph = captured(graphs)
    graphs.failing.add("replay")
    with pytest.raises(RuntimeError, match="replay"):
        graph.replay()
    assert graphs.log == ["before", "after"]


def test_an_end_that_fails_may_be_tried_again(graphs):
    graph = graphs.new()
    graph.capture_begin()
    graphs.failing.add("capture_end")
    with pytest.raises(RuntimeError, match="capture_end"):
        graph.capture_end()
    graph.capture_end()
    graphs.log.clear()
    graph.replay()
    assert graphs.log == ["before", "replay", "after"]


def test_a_capture_that_can_not_be_followed_is_ended(graphs):
    graphs.failing.add("fetches begin")
    with pytest.raises(RuntimeError, match="fetches begin"):
        graphs.new().capture_begin()
    assert graphs.log == ["capture_begin", "capture_end"]


def test_graphs_without_fetches_are_left_alone(graphs):
    graph = graphs.new()
    graph.capture_begin()
    graph._offload_fetches.tensors = 0
    graph.capture_end()
    graph.replay()
    assert graphs.log[-1] == "replay"
    assert "before" not in graphs.log


def test_a_reset_forgets(graphs):
    graph = captured(graphs)
    graph.reset()
    graph.replay()
    assert graphs.log == ["reset", "replay"]


def test_instances_that_can_keep_nothing(graphs):
    graph = graphs.base()
    graph.capture_begin()
    graph.capture_end()
    graph.replay()
    graph.reset()
    assert graphs.log == ["capture_begin", "capture_end", "replay", "reset"]
