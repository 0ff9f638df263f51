"""torch.compile with the aot_eager backend: graphs, results and recompilations."""

import torch
from bits import bits, state_bits
from torch._dynamo.testing import CompileCounterWithBackend

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2))
counter = CompileCounterWithBackend("aot_eager")
compiled = torch.compile(model, backend=counter, fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for rows in (4, 4, 6, 10):
    loss = compiled(torch.randn(rows, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), counter.frame_count, counter.op_count)
print(state_bits(model))


@torch.compile(backend="aot_eager", dynamic=True)
def mixed(x, scale):
    y = x.sin() + torch.ones_like(x) * scale
    if scale > 2:
        return y.to("cpu").cos()
    return torch.nn.functional.dropout(y, 0.5)


print(bits(mixed(torch.arange(6.0), 1)), bits(mixed(torch.arange(7.0), 3)))


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        (w,) = ctx.saved_tensors
        return gradient * w, None


x = torch.randn(3, 4, requires_grad=True)
for function in (Scaling.apply, lambda x, w: Scaling.apply(x, w) + 1):
    x.grad = None
    torch.compile(function, backend="aot_eager", fullgraph=True)(x, torch.randn(3, 4)).sum().backward()
    print(bits(x.grad))
exported = torch.export.export(model, (torch.randn(4, 8),))
print([node.name for node in exported.graph.nodes])
