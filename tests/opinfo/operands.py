"""The operands of a call: what they are made of, and the same ones on other devices."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from helpers import COMPUTE, GPU, OFFLOAD
from torch.utils import _pytree as pytree

MANY = 12  # operands; in longer lists not each has a turn


def carry(tensor: torch.Tensor, device: torch.device, gradient: bool) -> torch.Tensor:
    """A leaf with memory of its own on ``device``: the same values, sizes, strides, place in the storage, conj and neg bits."""
    if tensor.layout != torch.strided:
        copy = tensor.detach().clone().to(device)
    else:
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        copy = flat.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        copy = copy.conj() if tensor.is_conj() else copy
        copy = torch._neg_view(copy) if tensor.is_neg() else copy
        copy = copy.detach()
    return copy.requires_grad_(gradient and tensor.requires_grad)


@dataclass
class Call:
    """The arguments of one call, as a flat list: tensors, and everything else."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, sample: Any) -> "Call":
        return cls(*pytree.tree_flatten((sample.input, sample.args, sample.kwargs)))

    @property
    def tensors(self) -> list[int]:
        """Which leaves are tensors."""
        return [k for k, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def movable(self) -> list[int]:
        """Which leaves can live on offload: dense tensors."""
        return [k for k in self.tensors if self.leaves[k].layout == torch.strided and not self.leaves[k].is_nested]

    def names_device(self) -> bool:
        return any(isinstance(leaf, torch.device) or leaf == str(COMPUTE) for leaf in self.others())

    def others(self) -> Iterator[Any]:
        return (leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor))

    def size(self) -> int:
        return sum(self.leaves[k].numel() for k in self.tensors)

    def to(
        self, offloaded: Iterable[int], gradient: bool, everything: bool = False, plain: torch.device = COMPUTE
    ) -> "Call":
        """The same call with these tensors on offload, the others on ``plain``, and a device that is named on offload if it is
        ``everything`` that lives there."""
        offloaded = set(offloaded)
        named = OFFLOAD if everything else plain

        def leaf(k: int, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return carry(value, OFFLOAD if k in offloaded else plain, gradient)
            if isinstance(value, torch.device) or (isinstance(value, str) and value in (str(COMPUTE), COMPUTE.type)):
                return named
            return value

        return Call([leaf(k, value) for k, value in enumerate(self.leaves)], self.spec)

    def arguments(self) -> tuple[Any, tuple, dict]:
        return pytree.tree_unflatten(self.leaves, self.spec)

    def operands(self) -> list[torch.Tensor]:
        return [self.leaves[k] for k in self.tensors]


def mixtures(count: int) -> list[frozenset[int]]:
    """Which of ``count`` operands are on offload: each in turn, and all but one; of long lists some."""
    everything = frozenset(range(count))
    turns = range(0, count, 1 + count // MANY)
    one = [frozenset({k}) for k in turns]
    all_but_one = [everything - {k} for k in turns]
    return list(dict.fromkeys(mixture for mixture in one + all_but_one if 0 < len(mixture) < count))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def result_device(operands: list[torch.Tensor]) -> torch.device:
    """Where a new value lives, by the placement rule."""
    offload = [t for t in operands if t.device.type == "offload"]
    plain = [t for t in operands if t.device.type != "offload"]
    if any(t.dim() > 0 for t in plain):
        return COMPUTE
    if GPU and any(t.device.type == "cuda" for t in plain) and not any(t.dim() > 0 for t in offload):
        return COMPUTE
    return OFFLOAD if offload or not plain else COMPUTE


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or b.layout != torch.strided or a.device.type != b.device.type:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.untyped_storage().nbytes() > 0
