"""The profiler's events, and the operators that a dispatch mode sees."""

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(24, 2))
x = torch.randn(3, 2, 8)


def step() -> None:
    model(x).square().mean().backward()


step()
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
    step()
print(sorted((event.key, event.count) for event in profiled.key_averages()))
with profile() as default:
    step()
print(default.use_device, sorted(str(activity) for activity in default.activities))
print(default.key_averages().table(row_limit=1).splitlines()[1].split())


class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func, end=" ")
        return func(*args, **(kwargs or {}))


with Log():
    step()
print()
with FlopCounterMode(display=False) as flops:
    step()
print(flops.get_total_flops())
