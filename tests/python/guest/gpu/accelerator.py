"""What torch.accelerator answers, and bare device indices."""

import torch
from bits import bits, outcome

print(torch.cuda.is_initialized(), torch.cuda.is_available())
print(torch.accelerator.is_available(), torch.accelerator.device_count() == torch.cuda.device_count())
print(torch.accelerator.current_accelerator(), torch.accelerator.current_device_index(), torch._C._get_accelerator())
print(torch.get_device_module().__name__, torch._utils._get_available_device_type())
print(torch.accelerator.current_stream() == torch.cuda.current_stream(), torch.accelerator.memory_allocated())
stream = torch.Stream()
with stream:
    print(torch.accelerator.current_stream() == stream, torch.cuda.current_stream().stream_id == stream.stream_id)
event = torch.Event(enable_timing=True)
event.record()
torch.accelerator.synchronize()
print(event.query(), event.device)

x = torch.arange(4.0)
print(x.to(0).device, torch.device(0), torch.zeros(1, device=0).device, torch.nn.Linear(2, 2).to(0).weight.device)
print(x.cuda().device, x.to("cuda").device, x.to(0, non_blocking=True).get_device(), bits(x.to(0)))
print(outcome(lambda: x + x.to(0)))
print(outcome(lambda: torch.nn.functional.linear(x.to(0), torch.ones(2, 4))))
print(outcome(lambda: x.to(torch.cuda.device_count())))
