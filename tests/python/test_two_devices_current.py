"""Which of two devices is the current one: of each thread, within contexts, and within functions that these decorate."""

import threading

import pytest
import torch
from helpers import GPU
from two_devices import HOMES, needs_two_devices, nothing_is_left  # noqa: F401

pytestmark = needs_two_devices


def test_devices_by_their_index():
    for index, home in enumerate(HOMES):
        assert torch.ones(1, device=home).device == home
        assert torch.ones(1).to(f"offload:{index}").device == home
        assert torch.nn.Linear(2, 2, device=home).weight.device == home
        assert torch.ones(1).offload(index).device == home
        with torch.offload.device(index):
            assert torch.offload.current_device() == index
            assert torch.ones(1, device="offload").device == home
            assert torch.empty_like(torch.ones(1), device="offload").device == home
            assert torch.nn.Linear(2, 2).to("offload").weight.device == home
        with torch.offload.device_of(torch.ones(1, device=home)), torch.device("offload"):
            assert torch.arange(3).device == home
    beyond = torch.offload.device_count()
    for refused in (lambda: torch.ones(1, device=f"offload:{beyond}"), lambda: torch.offload.set_device(beyond)):
        with pytest.raises((RuntimeError, ValueError), match=rf"no device offload:{beyond}"):
            refused()
    with pytest.raises(RuntimeError, match="can't be fetched to"):
        torch.ops.offload.fetch(torch.ones(1, device="offload"), torch.device("cuda" if GPU else "cpu", beyond))


def test_each_thread_has_a_current_device():
    inside, done = threading.Event(), threading.Event()
    seen = []

    def run():
        seen.append(torch.ones(1, device="offload").device)
        torch.offload.set_device(1)
        inside.set()
        done.wait(60)
        seen.append(torch.ones(1, device="offload").device)

    with torch.offload.device(1):
        thread = threading.Thread(target=run)
        thread.start()
    inside.wait(60)
    assert torch.ones(1, device="offload").device == HOMES[0]
    done.set()
    thread.join()
    assert seen == HOMES


SCOPES = {
    "device": lambda: torch.offload.device(1),
    "stream": lambda: torch.offload.stream(torch.offload.Stream(1)),
    "none": lambda: torch.offload.device(None),
}


def overlapping(call):
    """Runs ``call(inside)`` on two threads, one with each device. The first enters before the second, and leaves before it.

    Returns:
        Of each the devices that were current before, inside and after.
    """
    meet, seen = threading.Barrier(2, timeout=60).wait, {}

    def inside(ordinal):
        if ordinal == 0:
            meet()  # the second may enter
        meet()  # both are inside
        if ordinal == 1:
            meet()  # the first has left
        return torch.offload.current_device()

    def run(ordinal):
        torch.offload.set_device(HOMES[ordinal])
        before = torch.offload.current_device()
        if ordinal == 1:
            meet()
        within = call(lambda: inside(ordinal))
        if ordinal == 0:
            meet()
        seen[ordinal] = (before, within, torch.offload.current_device())

    threads = [threading.Thread(target=run, args=(ordinal,)) for ordinal in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


@pytest.mark.parametrize("scope", SCOPES)
def test_threads_in_one_context_go_back_to_where_each_was(scope):
    context = SCOPES[scope]()

    def call(inside):
        with context:
            return inside()

    assert overlapping(call) == {k: (k, k if scope == "none" else 1, k) for k in (0, 1)}


def test_threads_in_one_decorated_function_go_back_to_where_each_was():
    @torch.offload.device(1)
    def call(inside, again=True):
        return call(inside, again=False) if again else inside()

    assert overlapping(call) == {k: (k, 1, k) for k in (0, 1)}


def test_a_context_within_itself():
    for scope in ("device", "stream"):
        context = SCOPES[scope]()
        with context, torch.offload.device(0), context:
            assert torch.offload.current_device() == 1
        assert torch.offload.current_device() == 0


def test_a_negative_index_changes_nothing():
    for index in HOMES:
        with torch.offload.device(index), torch.offload.device(-1):
            assert torch.ones(1, device="offload").device == index
            torch.offload.set_device(-1)
            assert torch.ones(1, device="offload").device == index


def test_a_decorated_generator_goes_back_where_it_is_suspended():
    @torch.offload.device(1)
    def made():
        for _ in range(2):
            yield torch.ones(1, device="offload").device

    seen = [(device, torch.offload.current_device()) for device in made()]
    assert seen == [(HOMES[1], 0)] * 2
