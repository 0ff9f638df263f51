"""Transformer blocks of the Llama-3 shape in plain PyTorch: the work that the benchmarks share.

A block is RMSNorm, causal attention with grouped keys and values under rotary position embedding, RMSNorm, and a SwiGLU
feed-forward net, each half with a residual connection. At the size of Llama-3-8B (`LLAMA_8B`) it has 218,112,000 parameters,
436 MB in bfloat16. Source of the shape: Llama 3's published configuration.
"""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Shape:
    """Sizes of a block: features of the residual stream and of the feed-forward net, heads of queries, of keys and values."""

    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


LLAMA_8B = Shape(hidden=4096, feed_forward=14336, heads=32, kv_heads=8)
TINY = Shape(hidden=64, feed_forward=128, heads=4, kv_heads=2)


@functools.lru_cache(maxsize=4)
def rotation(length: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding (base 500,000), each of shape (length, size)."""
    frequencies = 500_000.0 ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, size)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """One block: (batch, length, hidden) to the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        keys = shape.kv_heads * shape.head_size
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, keys, bias=False)
        self.value = nn.Linear(shape.hidden, keys, bias=False)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.feed_forward_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        h = self.feed_forward_norm(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))

    def attend(self, x: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)

        cos, sin = rotation(x.shape[1], self.shape.head_size, x.dtype, x.device)
        query, key = rotate(heads(self.query(x)), cos, sin), rotate(heads(self.key(x)), cos, sin)
        mixed = scaled_dot_product_attention(query, key, heads(self.value(x)), is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def fill_normal(module: nn.Module, seed: int) -> None:
    """Parameters become normal with deviation 0.02, the weights of norms 1 plus that: values as real ones, never zeros."""
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.add_(1.0)


def make_blocks(count: int, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Sequential:
    """`count` blocks of random weights on `device`."""

    def one() -> Block:
        with torch.device("meta"):
            block = Block(shape).to(dtype)
        return block.to_empty(device=device)

    blocks = nn.Sequential(*(one() for _ in range(count)))
    fill_normal(blocks, seed)
    return blocks


def copied_to(blocks: nn.Sequential, device: str) -> nn.Sequential:
    """The same blocks on another device, copied one at a time so that no second whole copy exists on the way."""
    return nn.Sequential(*(copy.deepcopy(block).to(device) for block in blocks))


def make_input(tokens: int, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
    """Normal activations for `tokens` tokens in sequences of at most 2,048: (batch, length, hidden)."""
    length = min(tokens, 2048)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tokens // length, length, shape.hidden, dtype=dtype, device=device, generator=generator)


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


def gradients(module: nn.Module) -> Iterator[Tensor]:
    """The gradients of all parameters, in order."""
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient; run a backward first.")
        yield parameter.grad
