"""Random numbers of ``torch.offload``.

Offload tensors draw from two generators: the CPU's default one, which factories and filling in place use, as for a CPU
tensor; and, on a machine with GPUs, the default one of the paired CUDA device, where that makes a new value of offload tensors
alone (dropout, ``multinomial``). Each function here acts on both generators, from which CPU and CUDA tensors draw, too.
"""

from collections.abc import Iterable

import torch

from torch_offload import _C
from torch_offload._index import Device, current_device, device_count, index_of

_CUDA_STATE = 16  # bytes of a CUDA generator's state: a seed and an offset


def default_generators() -> tuple[torch.Generator, ...]:
    """The generator of each device ``offload:i``; all of them are the CPU's default one."""
    return tuple(_C.default_generator(index) for index in range(device_count()))


def _has_cuda() -> bool:
    return torch.cuda.is_available() and not torch.cuda._is_in_bad_fork()


def manual_seed(seed: int) -> None:
    """Seeds the CPU's generator and that of the CUDA device that the current device is paired with.

    A CUDA device that is not in use yet is seeded at its first use, as by ``torch.cuda.manual_seed``.
    """
    seed = int(seed)
    index = current_device()
    torch.default_generator.manual_seed(seed)
    if not torch.cuda._is_in_bad_fork():
        torch.cuda._lazy_call(lambda: _seed_cuda(index, seed), seed=True)


def _seed_cuda(index: int, seed: int) -> None:
    # Without a GPU there is an offload:0 all the same.
    if index < len(torch.cuda.default_generators):
        torch.cuda.default_generators[index].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds the CPU's generator and those of all CUDA devices, as ``torch.manual_seed`` does."""
    seed = int(seed)
    torch.default_generator.manual_seed(seed)
    if not torch.cuda._is_in_bad_fork():
        torch.cuda.manual_seed_all(seed)


def seed() -> int:
    """:func:`manual_seed` with a seed from the system's randomness.

    Returns:
        The new seed.
    """
    new = torch.default_generator.seed()
    manual_seed(new)
    return new


def seed_all() -> int:
    """:func:`manual_seed_all` with a seed from the system's randomness.

    Returns:
        The new seed.
    """
    new = torch.default_generator.seed()
    manual_seed_all(new)
    return new


def initial_seed() -> int:
    """The seed that the CPU's generator got last. That of the paired one is ``torch.cuda.initial_seed()``."""
    return torch.default_generator.initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """The state of what offload tensors draw from: of the CPU's generator, and of the paired CUDA device's after it.

    Returns:
        A CPU tensor of dtype uint8, for :func:`set_rng_state`.
    """
    index = index_of(device)
    states = [torch.default_generator.get_state()]
    if _has_cuda():
        states.append(torch.cuda.get_rng_state(index))
    return torch.cat(states)


def get_rng_state_all() -> list[torch.Tensor]:
    """:func:`get_rng_state` of each device. The CPU's generator, which all have in common, is in each of them."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Restores a state of :func:`get_rng_state`.

    A state that was taken without a GPU leaves the CUDA device's generator alone. Without a GPU only the CPU's part of a
    state is restored.

    Raises:
        TypeError: for what is no CPU tensor of dtype uint8.
        ValueError: for one of another length than a state has.
    """
    index = index_of(device)
    length = torch.default_generator.get_state().numel()
    if not isinstance(new_state, torch.Tensor):
        raise TypeError(f"expected a state of get_rng_state(), a tensor; got {type(new_state).__name__}.")
    if new_state.dtype != torch.uint8 or new_state.device.type != "cpu":
        raise TypeError(
            f"expected a state of get_rng_state(), a CPU tensor of dtype torch.uint8; "
            f"got one of dtype {new_state.dtype} on {new_state.device}."
        )
    shapes = [(length,), (length + _CUDA_STATE,)]
    if new_state.shape not in shapes:
        raise ValueError(
            f"expected a state of get_rng_state(), of shape ({length},), or ({length + _CUDA_STATE},) "
            f"from a machine with a GPU; got the shape {tuple(new_state.shape)}."
        )
    torch.default_generator.set_state(new_state[:length].clone())
    if new_state.numel() > length and _has_cuda():
        torch.cuda.set_rng_state(new_state[length:].clone(), index)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Restores states of :func:`get_rng_state_all`, the first for ``offload:0`` and so on."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]
