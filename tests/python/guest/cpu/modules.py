"""Three training steps of common layers."""

import torch
from bits import bits, state_bits
from torch import nn

MODELS = {
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2)
        ),
        (2, 3, 8, 8),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (2, 5, 16)),
    "attention": (lambda: nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0), (2, 5, 16)),
    "norms": (lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.RMSNorm(7), nn.Dropout(0.2), nn.AvgPool1d(2)), (3, 6, 7)),
    "lstm": (lambda: nn.LSTM(6, 7, 2, bidirectional=True), (5, 3, 6)),
}

for name, (build, shape) in MODELS.items():
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        x = torch.randn(shape, requires_grad=True)
        inputs = (x, x) if name == "attention" else (x,)
        out = model(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    print(name, bits(out, x.grad), state_bits(model))

torch.manual_seed(0)
embedding = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
embedding(torch.randint(20, (3, 5))).sum().backward()
print(bits(embedding.weight.grad.to_dense()))


class Offloads(nn.Module):
    """Has the name for itself: a submodule, a buffer and keys."""

    def __init__(self):
        super().__init__()
        self.offload = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.offload.weight)
        self.parts = nn.ModuleDict({"offload": nn.Linear(2, 2)})
        self.numbers = nn.ParameterDict({"offload": torch.ones(2)})
        self.rest = nn.Module()
        self.rest.register_buffer("offload", torch.ones(2))

    def forward(self, x):
        return self.offload(x) + self.numbers["offload"] + self.rest.offload


print(bits(Offloads()(torch.ones(1, 2))), sorted(Offloads().state_dict()), hasattr(nn.Linear(2, 2), "offload"))
