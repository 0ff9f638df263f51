"""deepcopy, pickle, and the bytes of torch.save."""

import copy
import hashlib
import io
import pickle

import torch
from bits import bits, outcome, state_bits

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Embedding(10, 6), torch.nn.Linear(6, 6), torch.nn.LSTM(6, 4))
model[1].bias = torch.nn.Parameter(model[1].weight.detach()[0])
twin = copy.deepcopy(model)
print(state_bits(twin), twin[1].bias is not model[1].bias)

view = torch.arange(12.0).reshape(3, 4)[:, 1:3]
for value in (view, torch.nn.Parameter(view.clone()), torch.Size([2]), torch.device("cpu")):
    # A pickled tensor holds the address of its storage.
    print(pickle.loads(pickle.dumps(value)))

for zipped in (True, False):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "view": view, "step": 3}, file, _use_new_zipfile_serialization=zipped)
    if zipped:  # the older format writes addresses of storages
        print(len(file.getvalue()), hashlib.sha256(file.getvalue()).hexdigest()[:16])
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    print(bits(*loaded["model"].values(), loaded["view"]), loaded["view"].stride())
    file.seek(0)
    print(outcome(lambda file=file: torch.load(file, map_location="meta")["view"].device))

print(bits(view.clone(), view.to(torch.float64), view.to("cpu", copy=True), torch.from_numpy(view.numpy())))
moved = model.to("meta")
print(moved is model, next(model.parameters()).device, outcome(lambda: model.to("cpu")))
