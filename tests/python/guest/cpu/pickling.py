"""Pickles of tensors, modules and optimizers, byte by byte, and what comes back of them."""

import copy
import io
import pickle

import torch
from bits import bits, outcome

torch.manual_seed(1)
base = torch.randn(4, 6)
net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.AdamW(net.parameters())
net(base).sum().backward()
optimizer.step()

for value in (base, base.t(), base[1:], torch.nn.Parameter(base), base.requires_grad_(), base.detach().bfloat16()):
    for protocol in (2, 5):
        data = pickle.dumps(value, protocol=protocol)
        back = pickle.loads(data)
        # A storage is named by its address, which is longer in some processes than in others.
        unnamed = data.replace(str(value.untyped_storage()._cdata).encode(), b"")
        print(len(unnamed), b"offload" in data, type(back), back.device, back.requires_grad, back.stride(), bits(back))
one, two = pickle.loads(pickle.dumps([base.detach(), base.detach()[1:]]))
one.zero_()
print(bits(two))
back, its = pickle.loads(pickle.dumps([net, optimizer]))
print(bits(*back.state_dict().values()), sorted(its.state_dict()), its.param_groups[0]["params"][0] is back[0].weight)
print(outcome(lambda: bits(pickle.loads(pickle.dumps(base.detach().to(torch.float8_e4m3fn))).float())))
print(outcome(lambda: pickle.loads(pickle.dumps(base.untyped_storage())).nbytes()))
for new in (True, False):
    file = io.BytesIO()
    torch.save(net.state_dict(), file, _use_new_zipfile_serialization=new)
    file.seek(0)
    print(bits(*torch.load(file).values()))
generator = torch.Generator().manual_seed(3)
print(bits(torch.rand(3, generator=copy.deepcopy(generator)), torch.rand(3, generator=generator)))
