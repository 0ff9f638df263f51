"""What torch.accelerator and its neighbours answer."""

import torch
from bits import outcome

print(torch.accelerator.is_available(), torch.accelerator.device_count())
print(outcome(torch.accelerator.current_accelerator))
print(outcome(lambda: torch.accelerator.current_accelerator(check_available=True)))
print(outcome(torch.accelerator.current_device_index))
print(outcome(torch.accelerator.current_stream))
print(outcome(torch.accelerator.synchronize))
print(outcome(torch.accelerator.memory_allocated))
print(outcome(lambda: torch.get_device_module().__name__))
print(outcome(lambda: torch._C._get_accelerator()))
print(outcome(torch._utils._get_available_device_type))
print(outcome(torch._utils._get_all_device_indices))
print(outcome(lambda: torch.Stream()))
print(outcome(lambda: torch.Event()))
print(torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda.device_count())
