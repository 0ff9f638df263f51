"""What a compiled model may also have, and how it may also be compiled: each gives what it gives on the plain device."""

import copy
import functools

import pytest
import torch
from compiling import BACKENDS, compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, OFFLOAD, assert_same, data, grads, layers
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Transposed(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 4, 3, groups=2, dilation=2),
        )


class Checkpointed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner, self.outer, self.options = layers(2), nn.Linear(8, 8), options

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, **self.options))


MODELS = {
    "transposed convolutions": (Transposed, (2, 3, 5, 5)),
    "reentrant checkpoint": (lambda: Checkpointed(use_reentrant=True), (4, 8)),
    "selective checkpoint": (
        lambda: Checkpointed(
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
        ),
        (4, 8),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.2)),
        (4, 8),
    ),
}


def trained(model, device, x, backend, **options):
    """Two steps of a compiled copy: outputs and gradients."""
    torch.compiler.reset()
    torch.manual_seed(1)
    model = copy.deepcopy(model).to(device)
    step, x, seen = compiled(model, backend, **options), x.clone().requires_grad_(), []
    for _ in range(2):
        model.zero_grad()
        y = step(x)
        y.square().mean().backward()
        seen.append((y.detach(), {name: gradient.cpu() for name, gradient in grads(model).items()}))
    return seen, x.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_training(name, backend):
    """Random numbers are eager's in both, which inductor's own kernels draw otherwise."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), data(*shape)
    with inductor_config.patch(fallback_random=True):
        expected, actual = (trained(model, device, x, backend) for device in (COMPUTE, OFFLOAD))
    assert_same(actual, expected)


def test_choices_by_measuring():
    """Two compilations may choose other kernels."""
    torch.manual_seed(0)
    model, x = layers(2, width=32), data(16, 32)
    expected, actual = (
        trained(model, device, x, "inductor", mode="max-autotune-no-cudagraphs") for device in (COMPUTE, OFFLOAD)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
