"""Three training steps of common layers, with cuDNN and attention kernels."""

import torch
from bits import bits, state_bits
from torch import nn

MODELS = {
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2)
        ),
        (2, 3, 16, 16),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (2, 16, 64)),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.RMSNorm(8), nn.Dropout(0.2)), (3, 6, 8)),
    "lstm": (lambda: nn.LSTM(16, 16, 2, bidirectional=True), (5, 3, 16)),
}

torch.use_deterministic_algorithms(True, warn_only=True)
for name, (build, shape) in MODELS.items():
    torch.manual_seed(0)
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for _ in range(3):
        x = torch.randn(shape, device="cuda", requires_grad=True)
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    print(name, bits(out, x.grad), state_bits(model))
