"""Keeps the defaults of PyTorch's Python code what they are without this package.

Some of them fall on any PrivateUse1 backend, where there is no GPU or even beside one. That an offload tensor
lives in host memory makes them wrong: the device has no kernels of its own, and a program has to ask for it by name.
"""

import functools
import sys

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity


def leave_defaults_alone() -> None:
    """To be called once, after the backend is registered."""
    _leave_profiler_activities()
    _leave_kernels_to_cuda()
    _leave_available_device_type()
    _leave_checkpoint_loader()


def _leave_profiler_activities() -> None:
    # profile() profiles all listed activities unless told otherwise. What offload tensors enqueue is listed as CUDA's.
    listed = torch.autograd._supported_activities
    torch.autograd._supported_activities = lambda: listed() - {ProfilerActivity.PrivateUse1}


def _leave_kernels_to_cuda() -> None:
    # The profiler takes every kernel for one of the PrivateUse1 backend, as soon as that has a name; this one has none.
    kineto_event = torch._C._autograd._KinetoEvent
    told = kineto_event.device_type

    @functools.wraps(told)
    def device_type(event: object) -> DeviceType:
        found = told(event)
        return DeviceType.CUDA if found == DeviceType.PrivateUse1 else found

    kineto_event.device_type = device_type


def _leave_available_device_type() -> None:
    # Without a GPU, DataParallel would move its model to offload.
    chosen = torch._utils._get_available_device_type

    def available_device_type() -> str | None:
        name = chosen()
        return None if name == "offload" else name

    # Modules that are loaded hold the function by its name.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("_get_available_device_type") is chosen:
            module._get_available_device_type = available_device_type


def _leave_checkpoint_loader() -> None:
    # Without a GPU, torch.distributed.checkpoint would copy its tensors on a stream of any backend that is available.
    available = torch.offload.is_available

    @functools.wraps(available)
    def is_available() -> bool:
        return sys._getframe(1).f_globals.get("__name__") != "torch.distributed.checkpoint.filesystem" and available()

    is_available._dynamo_marked_constant = True  # as device_count() is
    torch.offload.is_available = is_available
