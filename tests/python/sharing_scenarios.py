"""Programs of several processes that share offload tensors. Each ends by itself: a process that waits too long exits.

``run(name, method)`` runs one with the start method of that name; workers are found by their names in this module.
"""

import contextlib
import faulthandler
import functools
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from helpers import CACHED, COMPUTE, CPU, OFFLOAD, assert_same, at, data, layers
from torch import nn

import torch_offload

LIMIT = 100  # seconds
END = "end"


def worker(function: Callable[..., None]) -> Callable[..., None]:
    """Ends a process that hangs, and says where."""

    @functools.wraps(function)
    def guarded(*args: Any) -> None:
        # Not faulthandler's own timer: its thread holds a lock, which a forked child would wait for.
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(LIMIT)
        torch.set_num_threads(1)
        function(*args)

    return guarded


@worker
def run(name: str, method: str) -> None:
    """Runs a scenario, which asserts what it is about."""
    globals()[name](mp.get_context(method))


class Children:
    """Processes that answer questions: each has a pipe."""

    def __init__(self, context: Any, target: Callable[..., None], count: int, *args: Any) -> None:
        self.pipes = []
        self.processes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *args), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def ask(self, question: Any = None) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(question)
        return [self.answer(pipe) for pipe in self.pipes]

    def answer(self, pipe: Any) -> Any:
        assert pipe.poll(LIMIT)
        return pipe.recv()


@contextlib.contextmanager
def children(context: Any, target: Callable[..., None], count: int, *args: Any) -> Iterator[Children]:
    those = Children(context, target, count, *args)
    yield those
    for pipe in those.pipes:
        pipe.send(END)
    for process in those.processes:
        process.join(LIMIT)
        assert process.exitcode == 0, process.exitcode


def questions(pipe: Any) -> Iterator[Any]:
    while (question := pipe.recv()) != END:
        yield question


def pss() -> int:
    """This process's part of the shared memory that it has mapped, in bytes: what n processes use counts an n-th in each."""
    total, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            word = line.split()[0]
            if not word.endswith(":"):
                ours = "memfd:torch_offload" in line
            elif ours and word == "Pss:":
                total += int(line.split()[1]) << 10
    return total


def weights_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@worker
def forwards(pipe: Any, model: nn.Module) -> None:
    for _ in questions(pipe):
        with torch.no_grad():
            pipe.send(model(data(2, model[0].in_features)).cpu().tolist())


@worker
def footprints(pipe: Any, model: nn.Module) -> None:
    for question in questions(pipe):
        if question == "run":
            with torch.no_grad():
                pipe.send(model(data(2, model[0].in_features)).cpu().tolist())
        else:
            stats = torch_offload.memory_stats()
            pipe.send((pss(), stats["host.reserved_bytes.current"], stats["host.shared_bytes.current"]))


def one_copy(context: Any) -> None:
    """A model that several processes use is in memory once."""
    torch.manual_seed(0)
    model = layers(4, 1024).to(OFFLOAD)
    size = weights_of(model)
    model.share_memory()
    gc.collect()
    torch_offload.empty_cache()
    with torch.no_grad():
        expected = model(data(2, 1024)).cpu().tolist()
    with children(context, footprints, 3, model) as those:
        assert those.ask("run") == [expected] * 3
        answers = those.ask("footprint")
        total = pss() + sum(part for part, _, _ in answers)
        assert size <= total <= 1.05 * size, (size, total)
        for _, reserved, shared in answers:
            assert reserved < size / 2, (reserved, size)
            assert size <= shared <= 1.05 * size, (shared, size)


def writes_between_forwards(context: Any) -> None:
    """Each forward of a child has the weights that the parent has written before it."""
    torch.manual_seed(0)
    model = layers(3).to(OFFLOAD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.share_memory()
    x = data(2, 8)
    seen = []
    with children(context, forwards, 2, model) as those:
        for _ in range(4):
            with torch.no_grad():
                expected = model(x).cpu().tolist()
            for _ in range(2):
                assert those.ask() == [expected] * 2
            seen.append(expected)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert all(one != other for k, one in enumerate(seen) for other in seen[:k])


@worker
def writes(pipe: Any, value: torch.Tensor) -> None:
    where = CPU if torch_offload._C.backend() == "host" else COMPUTE
    for question in questions(pipe):
        if question == "host":
            value.add_(1)
        elif question == "copy":
            value.copy_(torch.full((4, 4), 7.0, device=where))
        elif question == "row":
            value[1].fill_(9)
        elif question == "mixed":
            value.mul_(torch.full((4, 4), 2.0, device=where))
        pipe.send(value.cpu().tolist())


def writes_of_a_child(context: Any, value: torch.Tensor | None = None) -> None:
    """Whatever way a child writes, it has landed when it says so."""
    value = at(OFFLOAD, 4, 4).share_memory_() if value is None else value
    with children(context, writes, 1, value) as those:
        for question in ("host", "copy", "row", "mixed", "host", "row", "copy"):
            before = (value.to(COMPUTE) + 0).tolist()
            answer = those.ask(question)[0]
            assert value.to(COMPUTE).tolist() == answer
            assert (value + 0).tolist() == answer
            assert value.cpu().tolist() == answer
            assert before != answer


def writes_of_a_child_into_a_result(context: Any) -> None:
    """The same for memory that was born on the device."""
    writes_of_a_child(context, (at(OFFLOAD, 4, 4) + 1).share_memory_())


def writes_without_a_device(context: Any) -> None:
    """The same from a process that has no device, and so no cache."""
    value = at(OFFLOAD, 4, 4).share_memory_()
    os.environ["TORCH_OFFLOAD_LINK"] = "none"  # for the child
    writes_of_a_child(context, value)


@worker
def trains(pipe: Any, model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pipe.recv()  # both have started
    for _ in range(150):
        x = torch.randn(16, 4)
        y = x @ torch.arange(8.0).view(4, 2)
        optimizer.zero_grad()
        (model(x.to(COMPUTE)) - y.to(COMPUTE)).square().mean().backward()
        optimizer.step()
    pipe.send("done")
    assert pipe.recv() == END


def hogwild(context: Any) -> None:
    """Processes that train one model without any order between them."""
    model = nn.Linear(4, 2).to(OFFLOAD)
    model.share_memory()
    with children(context, trains, 2, model, 1) as those:
        those.ask("start")
    assert (model.weight.detach().cpu() - torch.arange(8.0).view(4, 2).t()).abs().max() < 0.01
    assert model.weight.grad is None


@worker
def aliases_of(inbox: Any, outbox: Any) -> None:
    first = inbox.get(timeout=LIMIT)
    again = inbox.get(timeout=LIMIT)
    whole, row, turned, _, other = first
    facts = [(t.shape, t.stride(), t.storage_offset(), t.requires_grad, type(t), t.device.type) for t in first]
    storages = [t.untyped_storage()._cdata for t in (*first, again)]
    whole[1, 0] = 50
    outbox.put(
        (facts, [storages.index(s) for s in storages], [t.tolist() for t in (row, turned, again)], whole.is_shared())
    )
    outbox.put((turned, other))
    inbox.get(timeout=LIMIT)  # until then this process has what it sent


def aliases(context: Any) -> None:
    """What has one storage has one storage there, also in another message; what comes back is what was sent."""
    whole = torch.arange(12.0, device=OFFLOAD).view(3, 4)
    parameter = nn.Parameter(torch.ones(2, 3, device=OFFLOAD))
    other = torch.arange(3, device=OFFLOAD, dtype=torch.bfloat16)
    sent = (whole, whole[1:, 1:], whole.t(), parameter, other)
    assert not whole.is_shared()
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=aliases_of, args=(inbox, outbox), daemon=True)
    process.start()
    inbox.put(sent)
    inbox.put(whole[2])
    facts, storages, values, is_shared = outbox.get(timeout=LIMIT)
    assert facts == [(t.shape, t.stride(), t.storage_offset(), t.requires_grad, type(t), "offload") for t in sent]
    assert storages == [0, 0, 0, 3, 4, 0]
    assert is_shared and whole.is_shared() and other.is_shared()  # noqa: PT018 - one fact
    assert whole[1, 0].item() == 50
    assert values == [whole[1:, 1:].tolist(), whole.t().tolist(), whole[2].tolist()]
    back = outbox.get(timeout=LIMIT)
    for mine, theirs in zip((whole, other), back, strict=True):
        assert theirs.untyped_storage()._cdata == mine.untyped_storage()._cdata
    inbox.put(None)
    process.join(LIMIT)
    assert process.exitcode == 0


@worker
def returns(outbox: Any, inbox: Any) -> None:
    made = torch.arange(6.0, device=OFFLOAD).view(2, 3)
    outbox.put([made.t(), made + 1, torch.ones((), device=OFFLOAD), torch.empty(0, 3, device=OFFLOAD)])
    inbox.get(timeout=LIMIT)


def results_of_a_child(context: Any) -> None:
    """A tensor outlives the process that made it; those of no dimension and of no element can be sent too."""
    outbox, inbox = context.Queue(), context.Queue()
    process = context.Process(target=returns, args=(outbox, inbox), daemon=True)
    process.start()
    turned, more, one, none = outbox.get(timeout=LIMIT)
    inbox.put(None)
    process.join(LIMIT)
    made = torch.arange(6.0).view(2, 3)
    assert turned.stride() == (1, 3)
    assert_same([turned, more, one, none], [made.t(), made + 1, torch.ones(()), torch.empty(0, 3)])
    for tensor in (turned, more, one, none):
        assert tensor.device.type == "offload"
        assert tensor.is_shared()


def names_of_files(context: Any) -> None:
    """The other sharing strategy."""
    mp.set_sharing_strategy("file_system")
    results_of_a_child(context)
    aliases(context)


class Made(torch.utils.data.Dataset):
    """Values that a worker makes on offload."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index), device=OFFLOAD)


def data_loader(context: Any) -> None:
    """Workers that return offload tensors."""
    batches = list(
        torch.utils.data.DataLoader(Made(), 2, num_workers=2, multiprocessing_context=context, timeout=LIMIT)
    )
    for k, batch in enumerate(batches):
        assert batch.device.type == "offload"
        assert batch.tolist() == [[2.0 * k] * 2, [2.0 * k + 1] * 2]


def data_loader_refused(context: Any) -> None:
    """Where a child can't use what its parent has used, that is what the loop raises."""
    torch.ones(1, device=OFFLOAD)
    loader = torch.utils.data.DataLoader(Made(), 2, num_workers=1, multiprocessing_context=context, timeout=LIMIT)
    with pytest.raises(RuntimeError, match=r"forked.*\"spawn\""):
        next(iter(loader))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@worker
def opens_and_drops(inbox: Any, outbox: Any) -> None:
    counts = []
    while (received := inbox.get(timeout=LIMIT)) is not None:
        assert received.sum().item() == received.numel()
        del received
        gc.collect()
        torch_offload.empty_cache()
        outbox.put(None)
        counts.append((descriptors(), torch_offload.memory_stats()["host.shared_bytes.current"]))
    outbox.put(counts)


def lifetime(context: Any) -> None:
    """Descriptors and memory go with the last tensor, in every process."""
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=opens_and_drops, args=(inbox, outbox), daemon=True)
    process.start()
    counts = []
    for _ in range(6):
        inbox.put(torch.ones(1000, device=OFFLOAD))
        outbox.get(timeout=LIMIT)
        gc.collect()
        torch_offload.empty_cache()
        counts.append((descriptors(), torch_offload.memory_stats()["host.shared_bytes.current"]))
    inbox.put(None)
    for these in (counts, outbox.get(timeout=LIMIT)):
        assert [shared for _, shared in these] == [0] * 6, these
        assert len({count for count, _ in these[1:]}) == 1, these  # the first one opens what sends them
    process.join(LIMIT)
    assert pss() == 0


def allow_descriptors(soft: int, hard: int) -> None:
    """So many more than there are."""
    have = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (have + soft, have + hard))


@worker
def receives_many(inbox: Any, outbox: Any, hard: int) -> None:
    outbox.put(torch.ones(1, device=OFFLOAD).sum().item())  # the device is in use, and what sends is open
    inbox.get(timeout=LIMIT)
    allow_descriptors(20, hard)
    for _ in range(2):
        try:
            outbox.put([t.tolist() for t in inbox.get(timeout=LIMIT)])
        except RuntimeError as error:
            outbox.put(str(error))


def sends_many(context: Any, hard: int) -> list[Any]:
    """What a process answers that may open so many descriptors, to a hundred tensors and to one."""
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=receives_many, args=(inbox, outbox, hard), daemon=True)
    process.start()
    assert outbox.get(timeout=LIMIT) == 1
    inbox.put(None)
    messages = [
        [torch.full((2,), float(k), device=OFFLOAD).share_memory_() for k in range(count)] for count in (100, 1)
    ]
    allow_descriptors(20, 600)  # for what is on its way
    answers = []
    for message in messages:
        inbox.put(message)
        answers.append(outbox.get(timeout=LIMIT))
    process.join(LIMIT)
    assert process.exitcode == 0
    return answers


def many(context: Any) -> None:
    """More storages than the soft limit of descriptors lets a process open: in the sender, and in the receiver."""
    assert sends_many(context, 600) == [[[float(k)] * 2 for k in range(100)], [[0.0] * 2]]


def too_many(context: Any) -> None:
    """More than a receiver's hard limit: it is told, and receives what comes next."""
    told, received = sends_many(context, 80)
    assert "takes a file descriptor" in told, told
    assert received == [[0.0] * 2], received


def many_arguments(context: Any) -> None:
    """The same for what a process is started with."""
    assert torch.ones(1, device=OFFLOAD).sum().item() == 1
    allow_descriptors(20, 600)
    model = layers(60, 4).to(OFFLOAD)
    model.share_memory()
    with torch.no_grad():
        expected = model(data(2, 4)).cpu().tolist()
    with children(context, forwards, 1, model) as those:
        assert those.ask() == [expected]


@worker
def waits(pipe: Any, value: torch.Tensor) -> None:
    value.add_(1)
    pipe.send(None)
    time.sleep(LIMIT)


def killed(context: Any) -> None:
    """A process that is killed leaves the others with what it has written, and nothing behind."""
    value = torch.zeros(1000, device=OFFLOAD).share_memory_()
    those = Children(context, waits, 1, value)
    those.answer(those.pipes[0])
    os.kill(those.processes[0].pid, signal.SIGKILL)
    those.processes[0].join(LIMIT)
    assert value.sum().item() == 1000
    value.add_(1)
    assert value.sum().item() == 2000
    del value
    gc.collect()
    torch_offload.empty_cache()
    assert pss() == 0


def fork_after_use(context: Any) -> None:
    """Beside a device a forked child gets the sentence, also for shared tensors, and ends as it should."""
    assert CACHED
    value = torch.zeros(10, device=OFFLOAD).share_memory_()
    pipe, theirs = context.Pipe()
    process = context.Process(target=uses, args=(theirs, value), daemon=True)
    process.start()
    assert pipe.poll(LIMIT)
    assert "forked" in pipe.recv()
    process.join(LIMIT)
    assert process.exitcode == 0
    assert value.add_(1).sum().item() == 10


@worker
def uses(pipe: Any, value: torch.Tensor) -> None:
    try:
        value.add_(1)
    except RuntimeError as error:
        pipe.send(str(error))
