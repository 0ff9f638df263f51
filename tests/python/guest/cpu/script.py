"""TorchScript, FX and fake tensors."""

import io

import torch
from bits import bits
from torch._subclasses.fake_tensor import FakeTensorMode

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).eval()
x = torch.randn(3, 4)
for scripted in (torch.jit.script(model), torch.jit.trace(model, x), torch.jit.freeze(torch.jit.script(model))):
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    print(bits(torch.jit.load(file)(x)), str(scripted.graph).count("aten::"))
print(torch.fx.symbolic_trace(model).code)
with FakeTensorMode() as mode:
    fake = mode.from_tensor(x)
    out = torch.nn.functional.linear(fake, torch.empty(5, 4))
    print(out.device, out.fake_device, tuple(out.shape), torch.empty(2, device="cuda").device)
