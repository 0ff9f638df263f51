"""The profiler's view of a training step: operators, and kernels where the machine lets them be traced."""

import torch
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
x = torch.randn(16, 64, device="cuda")


def step() -> None:
    model(x).square().mean().backward()
    torch.cuda.synchronize()


step()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
    step()
events = profiled.events()
print(sorted(event.name for event in events if event.device_type.name == "CPU" and event.name.startswith("aten::")))
print(sorted({(event.device_type.name, event.name) for event in events if event.device_type.name != "CPU"}))
with profile() as default:
    step()
print(default.use_device, sorted(str(activity) for activity in default.activities))
