"""``torch.distributed``: no backend takes offload tensors, which one sentence says; copies elsewhere work as ever."""

import pytest
from helpers import passes

PRELUDE = """
import torch, torch.distributed as dist, torch_offload
import torch.distributed._functional_collectives as functional

def start(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

def ones():
    return torch.ones(3, device="offload")
"""

CALLS = {
    "allreduce_": "dist.all_reduce(ones())",
    "broadcast_": "dist.broadcast(ones(), 0)",
    "allgather_": "dist.all_gather([ones()], ones())",
    "_allgather_base_": "dist.all_gather_into_tensor(ones(), ones())",
    "_reduce_scatter_base_": "dist.reduce_scatter_tensor(ones(), ones())",
}


def sentence(name: str) -> str:
    return (
        f"offload: torch.distributed can't communicate offload tensors (c10d::{name}), since no backend of this process group "
        "takes them; give it copies on the CPU or on CUDA, and DistributedDataParallel a model that is there."
    )


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,offload:gloo"])
def test_what_no_backend_takes(backend):
    calls = {
        **CALLS,
        "allgather_ of DistributedDataParallel": (
            "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to('offload'))"
        ),
        "allreduce_ of functional": "functional.all_reduce(ones(), 'sum', dist.group.WORLD)",
    }
    told = passes(
        f"""{PRELUDE}
start({backend!r})
for call in {list(calls.values())!r}:
    try:
        eval(call)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    else:
        print("no error", call)
copy = ones().cpu()
dist.all_reduce(copy)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
net(copy).sum().backward()
print(copy.tolist(), (ones() + 1).tolist(), net.module.bias.grad.tolist())
dist.destroy_process_group()
"""
    )
    *errors, usable = told.splitlines()
    assert errors == [sentence(name.split()[0]) for name in calls]
    assert usable == "[1.0, 1.0, 1.0] [2.0, 2.0, 2.0] [1.0, 1.0]"


def test_a_backend_that_takes_them_is_left_alone():
    assert (
        passes(
            f"""{PRELUDE}
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("cpu:gloo,offload:fake", store=dist.HashStore(), rank=0, world_size=1)
for call in {list(CALLS.values())!r}:
    eval(call)
print("done")
dist.destroy_process_group()
"""
        )
        == "done\n"
    )


def test_a_model_moved_after_data_parallel_took_it_is_refused():
    """PyTorch's hooks are lost with the move: each process would keep its own gradients."""
    told = passes(
        f"""{PRELUDE}
start("gloo")
x = torch.ones(4, 3)
for moved in ("net", "net.module"):
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    on_cpu = net(x).detach()
    eval(moved).to("offload")
    for call in (net, torch.compile(net, backend="eager")):
        try:
            call(x).sum().backward()
        except RuntimeError as error:
            print(str(error).splitlines()[0], net.module.bias.grad)
    with torch.no_grad():
        print(torch.equal(net(x), on_cpu))
adapted = torch.nn.Sequential(torch.nn.Linear(3, 3).requires_grad_(False), torch.nn.Linear(3, 2))
net = torch.nn.parallel.DistributedDataParallel(adapted)
adapted[0].to("offload")
net(x).sum().backward()
print(adapted[1].bias.grad.tolist())
dist.destroy_process_group()
"""
    )
    refused = (
        "offload: DistributedDataParallel does not reduce gradients of parameters that were moved to offload after it "
        "was made, and each process would train by itself; leave them on the CPU or on CUDA. None"
    )
    assert told.splitlines() == [refused, refused, "True"] * 2 + ["[4.0, 4.0]"]


def test_a_program_without_offload_has_no_parameters_looked_at():
    told = passes(
        f"""{PRELUDE}
class Parameters(list):
    def __iter__(self):
        for parameter in super().__iter__():
            looks.append(parameter)
            yield parameter

start("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
net._module_parameters = Parameters(net._module_parameters)
for step in range(3):
    if step == 2:
        torch.ones(1, device="offload")
    looks = []
    net(torch.ones(4, 3)).sum().backward()
    if step:  # in the first one PyTorch looks itself
        print(len(looks), net.module.bias.grad.tolist())
dist.destroy_process_group()
"""
    )
    assert told.splitlines() == ["0 [8.0, 8.0]", "2 [12.0, 12.0]"]
