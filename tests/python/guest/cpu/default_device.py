"""Default devices and the devices that factories choose."""

import torch
from bits import outcome

print(torch.get_default_device(), torch.get_default_dtype(), torch.empty(2).device)
with torch.device("meta"):
    print(torch.get_default_device(), torch.nn.Linear(2, 2).weight.device, torch.tensor(1).device)
torch.set_default_device("meta")
print(torch.get_default_device(), torch.randn(2).device, torch.randn(2, device="cpu").device)
torch.set_default_device(None)
print(torch.get_default_device(), torch.arange(3).device)
print(outcome(lambda: torch.set_default_device("nonsense")))
print(
    outcome(lambda: torch.device("cpu:0")),
    outcome(lambda: torch.device("cuda:1")),
    outcome(lambda: torch.device("cuda", 2)),
)
print(torch.device("cpu") == torch.empty(1).device, hash(torch.device("cpu")) == hash(torch.empty(1).device))
