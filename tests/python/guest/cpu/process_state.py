"""The state of the process that any library could have changed when it was imported."""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings

import torch

print(
    torch.get_num_threads(),
    torch.get_num_interop_threads(),
    threading.active_count(),
    len(os.listdir("/proc/self/task")),
)
print(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled())
print(torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.get_rng_state().sum() > 0)
print(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled)
print(torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
print(torch.cuda.is_initialized(), torch.autograd.is_multithreading_enabled(), torch.is_anomaly_enabled())
print(torch.utils.deterministic.fill_uninitialized_memory, torch.__future__.get_overwrite_module_params_on_conversion())
print(
    torch.overrides._get_current_function_mode_stack(), torch.utils._python_dispatch._get_current_dispatch_mode_stack()
)
print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1, signal.SIGCHLD)])
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, sys.excepthook is sys.__excepthook__)
print(
    gc.isenabled(),
    gc.get_threshold(),
    sys.getrecursionlimit(),
    sys.getswitchinterval(),
    sys.gettrace(),
    sys.getprofile(),
)
print(warnings.filters[:3], logging.getLogger().handlers, logging.getLogger().level, logging.getLogger("torch").level)
print(
    multiprocessing.get_start_method(allow_none=True),
    multiprocessing.active_children(),
    torch.multiprocessing.get_sharing_strategy(),
)
print(sorted(name for name in os.environ if name.startswith(("CUDA", "PYTORCH", "OMP", "KMP", "MKL"))))
