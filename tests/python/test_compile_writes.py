"""What a compiled function read of a tensor that it then writes to."""

import pytest
import torch
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, OFFLOAD, at, data


def used_after(buffer, x, copied):
    value = copied(buffer, x.device)
    buffer.add_(1)
    return value * 2 + x.sum(0)


def returned(buffer, x, copied):
    value = copied(buffer, x.device).view(2, 4)
    buffer.mul_(2)
    return value, value + 1


def written_in_part(buffer, x, copied):
    value, part = copied(buffer[:4], x.device), copied(buffer[2:], x.device)
    buffer[2:6].add_(1)
    return value, part.sin(), x * buffer


def written_twice(buffer, x, copied):
    first = copied(buffer, x.device)
    buffer.copy_(x[0] * 3)
    second = x * buffer
    buffer.add_(1)
    return first, second, copied(buffer, x.device)


def to(tensor, device):
    return tensor.to(device, copy=True)


def fetch(tensor, device):
    """Which gives memory that is shared: without a graph, a copy of it is the caller's to make."""
    if tensor.device == device:
        return tensor.clone()
    fetched = torch.ops.offload.fetch(tensor, device)
    return fetched if torch.compiler.is_compiling() else fetched.clone()


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("copied", [to, fetch])
@pytest.mark.parametrize("function", [used_after, returned, written_in_part, written_twice])
def test_what_was_read_before_a_write(function, copied, backend):
    """A graph without a backward that reads a buffer and then writes to it, after graphs of programs without offload."""
    x = data(4, 8)
    compiled(torch.sin, backend)(x)
    step = compiled(function, backend)

    def run(device):
        buffer = at("cpu", 8).to(device)
        seen = [(step if device == OFFLOAD else function)(buffer, x, copied) for _ in range(3)]
        return seen, buffer

    (results, buffer), expected = run(OFFLOAD), run(COMPUTE)
    torch.testing.assert_close((results, buffer.cpu()), (expected[0], expected[1].cpu()))
