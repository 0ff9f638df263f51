"""``torch_offload.trace`` and what torch.profiler sees of the cache."""

import gc
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import CACHED, GPU, LATE, data, layers
from torch import nn

import torch_offload
from torch_offload._names import name_tensors
from torch_offload._timeline import annotate

cached = pytest.mark.skipif(not CACHED, reason="nothing is copied where there is no cache")


def train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(data(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def traced(path: Path, run, **kwargs) -> tuple[list[dict], dict[str, int]]:
    """The events of the category offload, and the counts, of a run; a valid file."""
    with torch_offload.trace(path, **kwargs):
        run()
    timeline = json.loads(path.read_text())
    for event in timeline["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    return [e for e in timeline["traceEvents"] if e.get("cat") == "offload"], timeline["torch_offload"]


def of(events: list[dict], *activities: str) -> list[dict]:
    return [event for event in events if event["args"]["activity"] in activities]


def bytes_of(events: list[dict]) -> int:
    return sum(event["args"]["bytes"] for event in events)


def train_until_foretold(model: nn.Module) -> None:
    """After orders that could not be told, as other tests have, it takes a while until one is believed again."""
    before = torch.offload.memory_stats()["cache.prefetches"]
    for _ in range(200):
        train(model)
        if torch.offload.memory_stats()["cache.prefetches"] > before:
            return
    raise AssertionError("an order that repeats is never foretold")


@cached
@pytest.mark.parametrize("budget", [0, "auto"])
def test_every_copy_is_an_event(tmp_path, budget):
    model = layers(3).to("offload")
    torch.offload.empty_cache()
    torch_offload.set_budget(budget)
    try:
        if budget == 0:
            train_until_foretold(model)
        events, counts = traced(tmp_path / "t.json", lambda: train(model), model=model)
    finally:
        torch_offload.set_budget("auto")
    fetches = of(events, "fetch", "prefetch")
    assert len(of(events, "hit")) == counts["cache.hits"]
    assert len(of(events, "hit", "fetch")) == counts["cache.fetches"]
    # Two threads may be about to copy the same ahead: that of the program, and that of the host's jobs. One of them does.
    in_vain = len(of(events, "prefetch")) - counts["cache.prefetches"]
    assert in_vain == 0 or (in_vain > 0 and not LATE)
    assert len(fetches) - in_vain == counts["link.copies_to_device"] > 0
    unmade = bytes_of(fetches) - counts["link.bytes_to_device"]
    assert (unmade > 0) == (in_vain > 0)
    assert unmade <= bytes_of(of(events, "prefetch"))
    assert counts["cache.prefetches"] > 0 or budget == "auto"
    home = of(events, "write_back", "store")
    assert len(home) == counts["link.copies_to_host"] > 0
    assert bytes_of(home) == counts["link.bytes_to_host"]
    assert len(of(events, "evict")) == counts["cache.evictions"] > 0
    assert {event["args"]["tensor"] for event in fetches} == {name for name, _ in model.named_parameters()}
    gradients = {f"gradient of {name}" for name, _ in model.named_parameters()}
    assert {event["args"]["tensor"] for event in home} == gradients
    # What is given up are weights that the step has written and, without a budget, gradients that are home.
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    sizes |= {f"gradient of {name}": size for name, size in sizes.items()}
    given_up = of(events, "evict")
    assert {event["args"]["tensor"] for event in given_up} <= set(sizes)
    assert {event["args"]["tensor"] for event in given_up} & {name for name, _ in model.named_parameters()}
    for event in of(events, "hit", "fetch", "prefetch", "write_back", "store", "evict"):
        assert event["args"]["bytes"] == sizes[event["args"]["tensor"]], event
    for event in events:
        assert event["name"] == f"offload::{event['args']['activity']} {event['args']['tensor']}"


@cached
def test_copies_for_autocast_have_the_names_of_their_weights(tmp_path):
    layer, x = nn.Linear(8, 8, bias=False).to("offload"), data(4, 8)
    torch_offload._C.set_autocast_copies(True, least_bytes=0)
    torch_offload.set_budget(0)
    try:
        with torch.autocast(x.device.type, torch.bfloat16):
            events, _ = traced(tmp_path / "t.json", lambda: [layer(x) for _ in range(3)], model=layer)
    finally:
        torch_offload.set_autocast_copies(False)
        torch_offload.set_budget("auto")
    assert {e["args"]["tensor"] for e in of(events, "host_work")} == {"copy of weight"}
    seen = {e["args"]["tensor"]: e["args"]["bytes"] for e in of(events, "fetch", "prefetch")}
    assert seen == {"weight": 4 * 64, "copy of weight": 2 * 64}


@cached
def test_host_work_is_seen_whoever_does_it(tmp_path):
    model = layers(3).to("offload")
    train(model)
    torch_offload.synchronize()
    events, _ = traced(tmp_path / "t.json", lambda: train(model, steps=3), model=model)
    work = of(events, "host_work")
    assert Counter(event["args"]["tensor"] for event in work) == {name: 3 for name, _ in model.named_parameters()}
    assert bytes_of(work) == 3 * sum(parameter.nbytes for parameter in model.parameters())


@cached
@pytest.mark.parametrize("budget", [0, "auto"])
def test_a_gradient_says_whose_it_is(tmp_path, budget):
    """Two parameters of one storage, one by itself, and one that has no name."""
    model = nn.Module()
    flat = torch.randn(2, 16, 16).to("offload")
    model.register_parameter("first", nn.Parameter(flat[0]))
    model.register_parameter("second", nn.Parameter(flat[1]))
    model.register_parameter("third", nn.Parameter(torch.randn(16).to("offload")))
    nameless = torch.randn(16).to("offload").requires_grad_()
    torch_offload.set_budget(budget)

    def run():
        hidden = (data(4, 16) @ model.first).tanh() @ model.second
        (hidden * model.third * nameless).square().sum().backward()
        for tensor in (*model.parameters(), nameless):
            tensor.grad.cpu()
            tensor.grad = None

    try:
        run()
        events, _ = traced(tmp_path / "t.json", run, model=model)
    finally:
        torch_offload.set_budget("auto")
    home = Counter(event["args"]["tensor"] for event in of(events, "write_back", "store"))
    expected = {"gradient of first": 1, "gradient of second": 1, "gradient of third": 1, "gradient": 1}
    assert {name: home[name] for name in expected} == expected
    sizes = {event["args"]["tensor"]: event["args"]["bytes"] for event in of(events, "write_back", "store")}
    assert [sizes[f"gradient of {name}"] for name in ("first", "second", "third")] == [1024, 1024, 64]


@cached
def test_a_gradient_that_is_copied_says_whose_it_is(tmp_path):
    """One whose memory can't be handed over, as it is all one number."""
    model = nn.Linear(16, 16, bias=False).to("offload")

    def run():
        (data(16, 16) + model.weight).sum().backward()
        data(4, 16) @ model.weight.grad

    events, _ = traced(tmp_path / "t.json", run, model=model)
    assert "gradient of weight" in {event["args"]["tensor"] for event in of(events, "fetch", "hit")}


@cached
def test_bytes_are_of_the_tensor_that_is_named(tmp_path):
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 512, bias=False)).to("offload")
    torch.offload.empty_cache()
    with torch.no_grad():
        events, _ = traced(tmp_path / "t.json", lambda: model(data(4, 128)), model=model)
    seen = {event["args"]["tensor"]: event["args"]["bytes"] for event in of(events, "fetch", "prefetch")}
    assert seen == {"0.weight": 128 * 256 * 4, "0.bias": 256 * 4, "1.weight": 256 * 512 * 4}


@cached
def test_names_are_found_without_being_told(tmp_path):
    with torch.device("offload"):
        model = nn.Sequential(nn.Linear(8, 8))
    gc.collect()
    events, _ = traced(tmp_path / "t.json", lambda: model(data(4, 8)))
    named = {event["args"]["tensor"] for event in of(events, "fetch", "hit")}
    assert all(name.endswith(("0.weight", "0.bias")) for name in named), named
    assert len(named) == 2


@cached
def test_names_that_a_profiler_can_not_write(tmp_path):
    names = ['say "hi"', "größe", "日本", "tab\there", "back\\slash", "50% of it", "a b"]
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names}).to("offload")
    events, _ = traced(tmp_path / "t.json", lambda: [model[name](data(4, 8)) for name in names], model=model)
    named = {event["args"]["tensor"] for event in of(events, "fetch", "hit")}
    assert named == {f"{name}.weight" for name in names}


def test_modules_that_are_not_made_yet_have_no_part_in_it(tmp_path):
    class Half(nn.Module):
        def __init__(self, kept):
            kept.append(self)

    kept = []
    Half(kept)
    assert len(kept) == 1
    traced(tmp_path / "t.json", lambda: None)


@cached
def test_names_of_modules_with_buffers_alone(tmp_path):
    packed = nn.Module()
    packed.register_buffer("packed", torch.ones(4, 8, device="offload"))
    gc.collect()
    events, _ = traced(tmp_path / "t.json", lambda: data(4, 8) * packed.packed)
    assert all(event["args"]["tensor"].endswith("packed") for event in of(events, "fetch", "hit"))
    assert of(events, "fetch", "hit")


def test_the_file_is_where_the_program_was(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with torch_offload.trace("t.json"):
        monkeypatch.chdir(tmp_path / "other")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert not (tmp_path / "other" / "t.json").exists()


@cached
def test_a_name_goes_with_its_storage(tmp_path):
    model = nn.Linear(8, 8).to("offload")
    address = model.weight.untyped_storage().data_ptr()
    del model
    gc.collect()
    torch.offload.synchronize()
    others = []
    while len(others) < 4096 and address not in {other.untyped_storage().data_ptr() for other in others[-1:]}:
        others.append(torch.randn(8, 8).to("offload"))
    assert others[-1].untyped_storage().data_ptr() == address, "or the test shows nothing"
    events, _ = traced(tmp_path / "t.json", lambda: [data(8, 8) @ other for other in others], model=nn.Module())
    assert {event["args"]["tensor"] for event in of(events, "fetch", "hit")} == {"temporary"}


@cached
def test_other_runs_of_the_profiler_show_the_ranges():
    model = layers(2).to("offload")
    name_tensors(model)
    torch.offload.empty_cache()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        model(data(4, 8))
    fetched = Counter(e.name for e in profiler.events() if e.name.startswith("offload::fetch "))
    assert fetched == {
        f"offload::fetch {name} [{parameter.nbytes} B]": 1 for name, parameter in model.named_parameters()
    }


@cached
def test_other_runs_of_the_profiler_show_every_range_that_the_counts_tell_of():
    """Copies both ways, what is given up and what is waited for, each with a parameter's name and its bytes."""
    model = layers(3).to("offload")
    name_tensors(model)
    torch_offload.set_budget(0)
    try:
        torch.offload.empty_cache()
        train_until_foretold(model)
        torch_offload.synchronize()
        torch.offload.empty_cache()
        before = torch.offload.memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
            model(data(4, 8)).square().sum().backward()
            for parameter in model.parameters():
                parameter.grad.cpu()
                parameter.grad = None
        after = torch.offload.memory_stats()
    finally:
        torch_offload.set_budget("auto")
    seen = Counter()
    names = {}
    for event in profiler.events():
        if found := re.fullmatch(r"offload::(\w+) (.+) \[(\d+) B\]", event.name):
            activity, name, count = found.groups()
            seen[activity] += 1
            names.setdefault(activity, {})[name] = int(count)
    for activity, key in {"hit": "hits", "prefetch": "prefetches", "evict": "evictions"}.items():
        assert seen[activity] == after[f"cache.{key}"] - before[f"cache.{key}"], (activity, seen)
    assert seen["fetch"] + seen["hit"] == after["cache.fetches"] - before["cache.fetches"]
    assert seen["evict"] > 0
    copies = {"link.copies_to_device": ("fetch", "prefetch"), "link.copies_to_host": ("write_back", "store")}
    for key, activities in copies.items():
        assert sum(seen[activity] for activity in activities) == after[key] - before[key] > 0, (key, seen)
    weights = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    gradients = {f"gradient of {name}": size for name, size in weights.items()}
    assert names["wait"] == gradients  # which the host reads at once
    assert names.get("fetch", {}) | names.get("prefetch", {}) | names["hit"] == weights
    assert names["write_back"] | names.get("store", {}) == gradients
    assert (weights | gradients) | names["evict"] == weights | gradients
    assert set(seen) <= {"hit", "fetch", "prefetch", "write_back", "store", "evict", "wait", "host_work"}


@cached
def test_the_host_waits_for_gradients(tmp_path):
    model = nn.Linear(512, 512, bias=False).to("offload")
    torch.offload.empty_cache()

    def run():
        model(data(64, 512)).sum().backward()
        model.weight.grad.cpu()

    events, _ = traced(tmp_path / "t.json", run, model=model)
    (home,) = of(events, "write_back", "store")
    assert home["args"]["bytes"] == 512 * 512 * 4
    assert home["args"]["tensor"] == "gradient of weight"
    assert [wait["args"]["tensor"] for wait in of(events, "wait")] == ["gradient of weight"]
    for wait in of(events, "wait"):
        assert wait["args"]["bytes"] == 512 * 512 * 4
        assert wait["ts"] >= home["ts"] + home["dur"]


def test_a_file_is_written_without_a_cache_and_after_an_exception(tmp_path):
    with pytest.raises(ValueError, match="of mine"):
        traced(tmp_path / "t.json", lambda: [torch.ones(2).add(1), (_ for _ in ()).throw(ValueError("of mine"))])
    timeline = json.loads((tmp_path / "t.json").read_text())
    assert "aten::add" in {event["name"] for event in timeline["traceEvents"]}
    assert timeline["torch_offload"]["link.bytes_to_device"] == 0
    with pytest.raises(FileNotFoundError):
        traced(tmp_path / "none" / "t.json", lambda: None)


def span(cat: str, name: str, tid: int, ts: float, dur: float, **arguments) -> dict:
    pid = 1 if cat in ("user_annotation", "cuda_runtime", "cuda_driver") else 0
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": arguments}


def launch(correlation: int, called: float, ran: float, dur: float) -> list[dict]:
    return [
        span("cuda_runtime", "cudaLaunchKernel", 1, called, 1, correlation=correlation),
        span("kernel", f"gemm{correlation}", 7, ran, dur, correlation=correlation, stream=7),
    ]


def copied(correlation: int, tensor: str, called: float, ran: float, dur: float) -> list[dict]:
    return [
        span("user_annotation", f"offload::fetch {tensor} [64 B]", 1, called - 1, 4),
        span("cuda_runtime", "cudaMemcpyAsync", 1, called, 1, correlation=correlation),
        span("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, ran, dur, correlation=correlation, bytes=64),
    ]


def annotated(*events: list[dict]) -> list[dict]:
    timeline = {"traceEvents": [{"ph": "M", "name": "process_name"}, *(e for group in events for e in group)]}
    annotate(timeline)
    return timeline["traceEvents"][1:]


def test_a_stall_is_from_the_last_work_until_the_copy_has_landed():
    events = annotated(
        launch(1, 0, 10, 20),  # runs until 30
        copied(2, "a", 5, 8, 60),  # lands at 68
        copied(3, "b", 10, 68, 32),  # lands at 100
        launch(4, 15, 102, 10),
    )
    assert [e["name"] for e in events if e["cat"] == "gpu_memcpy"] == ["offload::fetch a", "offload::fetch b"]
    (stall,) = [e for e in events if e["args"].get("activity") == "stall"]
    assert stall["name"] == "offload::stall b"
    assert (stall["ts"], stall["dur"]) == (30, 70)
    assert (stall["pid"], stall["tid"]) == (0, 7)


def test_work_that_is_enqueued_late_has_not_waited_before():
    events = annotated(copied(2, "a", 5, 8, 60), launch(4, 50, 70, 10))
    (stall,) = [e for e in events if e["args"].get("activity") == "stall"]
    assert (stall["ts"], stall["dur"]) == (50, 18)


def test_a_hit_waits_for_the_copy_that_is_under_way():
    hit = [span("user_annotation", "offload::hit a [64 B]", 1, 90, 1)]
    events = annotated(copied(2, "a", 5, 8, 192), launch(3, 20, 30, 5), hit, launch(4, 95, 201, 10))
    stalls = [e for e in events if e["args"].get("activity") == "stall"]
    assert [(e["ts"], e["dur"], e["args"]["before"]) for e in stalls] == [(95, 105, "gemm4")]


def test_no_stall_where_the_copy_has_landed_or_work_went_on():
    assert not [
        e
        for e in annotated(
            launch(1, 0, 10, 90),  # runs until 100
            copied(2, "a", 5, 8, 60),
            launch(3, 15, 100, 10),
        )
        if e["args"].get("activity") == "stall"
    ]


def test_a_copy_of_the_users_keeps_its_name():
    events = annotated(
        [
            span("cuda_runtime", "cudaMemcpyAsync", 1, 2, 1, correlation=1),
            span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 5, 9, correlation=1),
        ],
        copied(2, "a", 50, 80, 60),
    )
    assert [e["name"] for e in events if e["cat"] == "gpu_memcpy"] == [
        "Memcpy HtoD (Pageable -> Device)",
        "offload::fetch a",
    ]


def test_a_file_that_can_not_be_written_is_known_before_anything_runs(tmp_path):
    with pytest.raises(FileNotFoundError), torch_offload.trace(tmp_path / "nowhere" / "t.json"):
        raise AssertionError("it ran")


@pytest.mark.gpu
@pytest.mark.whole_gpu  # a host that is kept from running is late itself, and stalls nowhere
def test_copies_on_the_gpu_have_names_and_bytes(tmp_path):
    assert GPU
    # The second one's first pass: nobody knows the order, so each weight is copied when its operation asks.
    warm, model = (nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)]).to("offload") for _ in "ab")
    x = torch.randn(8, 2048, device="cuda")
    torch_offload.set_budget(0)
    try:
        torch.offload.empty_cache()
        with torch.no_grad():
            warm(x)
            torch.offload.empty_cache()
            events, counts = traced(tmp_path / "t.json", lambda: model(x), model=model)
    finally:
        torch_offload.set_budget("auto")
    timeline = json.loads((tmp_path / "t.json").read_text())
    copies = [e for e in timeline["traceEvents"] if e.get("cat") == "gpu_memcpy" and "tensor" in e["args"]]
    assert len(copies) == counts["link.copies_to_device"] == 6
    assert sum(e["args"]["bytes"] for e in copies) == counts["link.bytes_to_device"] == 6 * 2048 * 2048 * 4
    assert {e["args"]["tensor"] for e in copies} == {name for name, _ in model.named_parameters()}
    # 16 MiB take longer than the multiplication with 8 rows: every layer waits for its weight, and no longer than for that.
    stalls = sorted(of(events, "stall"), key=lambda e: e["ts"])
    assert len({e["args"]["tensor"] for e in stalls}) == len(stalls) >= 5
    ends = {e["args"]["tensor"]: e["ts"] + e["dur"] for e in copies}
    assert all(e["ts"] + e["dur"] == pytest.approx(ends[e["args"]["tensor"]], abs=0.01) for e in stalls)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in itertools.pairwise(stalls))
