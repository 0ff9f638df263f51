"""A whole training step, backward and optimizer included, captured into a CUDA graph and replayed."""

import torch
from bits import bits, state_bits

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 64), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(64, 8)
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, device="cuda"), capturable=True)
x = torch.randn(16, 64, device="cuda")


def step() -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(5):
    x.copy_(torch.randn(16, 64, device="cuda"))
    graph.replay()
    print(loss.item().hex())
print(state_bits(model))

callable_model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()).cuda()
sample = torch.randn(4, 32, device="cuda", requires_grad=True)
graphed = torch.cuda.make_graphed_callables(callable_model, (sample,))
for _ in range(3):
    y = torch.randn(4, 32, device="cuda", requires_grad=True)
    graphed(y).square().sum().backward()
    print(bits(y.grad, *(p.grad for p in callable_model.parameters())))
