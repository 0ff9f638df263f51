"""What the tests of sparse tensors share."""

from collections.abc import Callable
from typing import Any

import torch
from helpers import COMPUTE, OFFLOAD, same


def coo(
    device: torch.device | str = OFFLOAD,
    *,
    shape: tuple[int, ...] = (5, 4),
    count: int = 7,
    dtype: torch.dtype = torch.float32,
    seed: int = 3,
    born: str = "host",
) -> torch.Tensor:
    """With an index or two that occur twice."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randint(size, (count,), generator=generator) for size in shape])
    values = torch.randn(count, generator=generator).to(dtype)
    made = torch.sparse_coo_tensor(indices, values, shape).to(device)
    return made * 1 if born == "device" else made


def parts(value: Any) -> Any:
    """What tells sparse tensors apart; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [parts(one) for one in value]
    if not isinstance(value, torch.Tensor) or value.layout is not torch.sparse_coo:
        return value
    return [value._indices(), value._values(), list(value.shape), value.is_coalesced(), value.sparse_dim()]


def same_parts(run: Callable[[torch.device], Any], truth: torch.device = COMPUTE) -> Any:
    """The same bits as on the plain device, in sparse results too; returns what the run on offload returned."""
    outcome: list[Any] = []

    def both(device: torch.device) -> Any:
        outcome.append(run(device))
        return parts(outcome[-1])

    same(both, truth=truth)
    return outcome[-1]
