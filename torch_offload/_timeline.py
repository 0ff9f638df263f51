"""A Chrome trace of PyTorch's profiler, in which the copies of the cache have names and waits for them are events.

What the profiler wrote: the ranges of Note [Ranges] (csrc/aten/activity_ranges.h) on the host's threads, the calls of
the driver, and with CUDA the kernels and copies on the GPU's streams, each with the ``correlation`` of the call that
enqueued it. A range and a call of one thread belong together where one contains the other. Nobody records a stall. It
is what is left: a stream stands still from the end of its last work, or from when its next work was enqueued if that
is later, until a copy has landed that the fetch, or the hit, before this work made it wait for. Work that began
before the copy had landed has not waited.
"""

import bisect
import re
from collections import defaultdict
from typing import Any, NamedTuple
from urllib.parse import unquote

Event = dict[str, Any]

_RANGE = re.compile(r"offload::(hit|fetch|prefetch|write_back|store|evict|wait|host_work) (.*) \[(\d+) B\]")
_HOST = "user_annotation"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")


class _Range(NamedTuple):
    begin: float
    end: float
    event: Event


def _end(event: Event) -> float:
    return event["ts"] + event.get("dur", 0)


def annotate(trace: Event) -> None:
    """Changes a trace in place.

    A range ``"offload::fetch layers.0.weight [16384 B]"`` gets the category ``offload`` and the arguments ``activity``,
    ``tensor`` and ``bytes``, and keeps its name without the bytes. A copy on the GPU that was enqueued within one gets the same
    arguments and name. New events ``"offload::stall layers.0.weight"`` are on the stream that waited.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = defaultdict(list)
    for event in events:
        if _describe(event) and event["cat"] == _HOST:
            event["cat"] = "offload"
            ranges[event["pid"], event["tid"]].append(_Range(event["ts"], _end(event), event))
    calls = {
        e["args"]["correlation"]: e for e in events if e.get("cat") in _CALLS and "correlation" in e.get("args", {})
    }
    work = [(e, calls[e["args"]["correlation"]]) for e in events if e.get("cat") in _ON_GPU and _correlates(e, calls)]
    for thread in ranges.values():
        thread.sort(key=lambda r: r.begin)
    compute = []
    copies = defaultdict(list)
    for event, call in work:
        issuer = _around(ranges[call["pid"], call["tid"]], call)
        if issuer is None:
            compute.append((event, call))
        elif event["cat"] == "gpu_memcpy":
            event["name"] = issuer["name"]
            event["args"].update({key: issuer["args"][key] for key in ("activity", "tensor")})
            copies[id(issuer)].append(event)
    trace["traceEvents"].extend(_stalls(ranges, compute, copies))


def _describe(event: Event) -> bool:
    match = _RANGE.fullmatch(event["name"])
    if match is None:
        return False
    tensor = unquote(match[2])
    event["name"] = f"offload::{match[1]} {tensor}"
    event.setdefault("args", {}).update(activity=match[1], tensor=tensor, bytes=int(match[3]))
    return True


def _correlates(event: Event, calls: dict[int, Event]) -> bool:
    return event.get("args", {}).get("correlation") in calls


def _around(ranges: list[_Range], call: Event) -> Event | None:
    at = bisect.bisect_right(ranges, call["ts"], key=lambda r: r.begin) - 1
    # Ranges do not contain one another, but for evictions, which are short.
    for candidate in reversed(ranges[max(0, at - 3) : at + 1]):
        if candidate.end >= call["ts"]:
            return candidate.event
    return None


def _stalls(
    ranges: dict[Any, list[_Range]], compute: list[tuple[Event, Event]], copies: dict[int, list[Event]]
) -> list[Event]:
    launched = defaultdict(list)
    on_stream = defaultdict(list)
    for event, call in compute:
        launched[call["pid"], call["tid"]].append((call["ts"], event))
        on_stream[event["pid"], event["tid"]].append(event)
    for thread in launched.values():
        thread.sort(key=lambda pair: pair[0])
    enqueued = {id(event): call["ts"] for event, call in compute}
    awaited: dict[int, Event] = {}  # by the work that waits: the copy that lands last
    landed: dict[str, Event] = {}  # by tensor: its last copy to the device
    for thread, found in ranges.items():
        for one in found:
            tensor = one.event["args"]["tensor"]
            if one.event["args"]["activity"] in ("fetch", "prefetch") and copies.get(id(one.event)):
                landed[tensor] = max(copies[id(one.event)], key=_end)
            if one.event["args"]["activity"] not in ("fetch", "hit") or tensor not in landed:
                continue
            at = bisect.bisect_left(launched[thread], one.end, key=lambda pair: pair[0])
            if at < len(launched[thread]):
                waits = launched[thread][at][1]
                awaited[id(waits)] = max(awaited.get(id(waits), landed[tensor]), landed[tensor], key=_end)
    stalls = []
    for stream in on_stream.values():
        free = 0.0
        for event in sorted(stream, key=lambda e: e["ts"]):
            copy = awaited.get(id(event))
            begin = max(free, enqueued[id(event)])
            if copy is not None and begin < _end(copy) <= event["ts"]:
                stalls.append(_stall(event, copy, begin))
            free = max(free, _end(event))
    return stalls


def _stall(event: Event, copy: Event, begin: float) -> Event:
    tensor = copy["args"]["tensor"]
    return {
        "ph": "X",
        "cat": "offload",
        "name": f"offload::stall {tensor}",
        "pid": event["pid"],
        "tid": event["tid"],
        "ts": begin,
        "dur": _end(copy) - begin,
        "args": {"activity": "stall", "tensor": tensor, "before": event["name"]},
    }
