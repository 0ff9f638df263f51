"""DataLoader with pinned memory and workers, feeding a training loop."""

import torch
from bits import bits, state_bits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
model = torch.nn.Linear(16, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for workers in (0, 2):
    loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=True, num_workers=workers)
    for x, y in loader:
        pinned = x.is_pinned() and y.is_pinned()
        loss = torch.nn.functional.cross_entropy(model(x.to(0, non_blocking=True)), y.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(workers, pinned, bits(x, y), loss.item().hex())
print(state_bits(model))
