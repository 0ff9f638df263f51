"""What inductor keeps of compiled graphs for other processes, and passes over graphs that users set."""

import copy
from pathlib import Path

import pytest
import torch
from compiling import compiled, fresh_compiler  # noqa: F401
from helpers import COMPUTE, GPU, OFFLOAD, SIM, assert_same, data, grads, passes
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import torch_offload
from torch_offload.compile import on_device


def test_a_second_process_takes_what_the_first_has_compiled(tmp_path):
    program = """
        import torch, torch_offload
        from torch._dynamo.utils import counters
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).to("offload")
        x = torch.ones(2, 8).to("cuda" if torch.cuda.is_available() else "cpu")
        step = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            print(torch.allclose(step(x), model(x)), counters["inductor"]["fxgraph_cache_hit"] > 0)
    """

    def run(**environment):
        return passes(program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), **environment).split()

    assert run() == ["True", "False"]
    assert run() == ["True", "True"]
    if not GPU:  # another device that computes
        assert run(TORCH_OFFLOAD_LINK="none" if SIM else "sim") == ["True", "False"]


def test_a_second_process_takes_training_too(tmp_path):
    """Forward and backward, over weights of other values, and with gradients that are those of eager training."""
    program = """
        import torch, torch_offload
        from torch._dynamo.utils import counters
        torch.manual_seed({seed})
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).to("offload")
        x = torch.ones(2, 8).to("cuda" if torch.cuda.is_available() else "cpu")
        seen = []
        for step in (torch.compile(model, fullgraph=True), model):
            model.zero_grad()
            step(x).square().sum().backward()
            seen.append([p.grad.cpu() for p in model.parameters()])
        torch.testing.assert_close(*seen)
        found = counters["inductor"]
        print(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"])
    """

    def run(seed):
        return passes(program.format(seed=seed), TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split()

    assert run(0) == ["0", "2", "0"]
    assert run(1) == ["2", "0", "1"]


def test_a_pass_of_the_users_is_part_of_the_key(tmp_path):
    """What was compiled with it is taken by another process that has it, and by none that has another."""
    program = """
        import torch, torch_offload
        from torch._dynamo.utils import counters
        from torch._inductor.custom_graph_pass import CustomGraphPass

        class Pass(CustomGraphPass):
            def __call__(self, graph):
                print("called", end=" ")
            def uuid(self):
                return "{name}"

        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).to("offload")
        x = torch.ones(2, 8).to("cuda" if torch.cuda.is_available() else "cpu")
        with torch._inductor.config.patch(post_grad_custom_post_pass=Pass()), torch.no_grad():
            torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))
        print(counters["inductor"]["fxgraph_cache_hit"])
    """

    def run(name):
        return passes(program.format(name=name), TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split()

    assert run("one") == ["called", "0"]
    assert run("one") == ["1"]
    assert run("two") == ["called", "0"]


class Doubling(CustomGraphPass):
    """Has every matrix product doubled, in forward and backward."""

    def __init__(self):
        self.calls = self.fetches = 0

    def __call__(self, graph):
        self.calls += 1
        self.fetches += len(graph.find_nodes(op="call_function", target=torch.ops.offload.fetch.default))
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            with graph.inserting_after(node):
                doubled = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
            doubled.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(doubled, delete_user_cb=lambda user, doubled=doubled: user is not doubled)

    def uuid(self):
        return None  # what is compiled with it goes to no cache


PASSES = ["joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"]


@pytest.mark.parametrize("name", PASSES)
def test_a_users_pass(name):
    """It sees the fetches as operations, and the package's own pass runs behind what it has changed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU(), nn.Linear(8, 8, bias=False)).to(COMPUTE)
    seen, x = [], data(4, 8)
    for device in (COMPUTE, OFFLOAD):
        model, doubling = copy.deepcopy(plain).to(device), Doubling()
        with torch._inductor.config.patch({name: doubling}):
            y = compiled(model, "inductor")(x)
            y.square().sum().backward()
        seen.append((doubling.calls, y.detach(), {key: gradient.cpu() for key, gradient in grads(model).items()}))
    assert_same(seen[1], seen[0])
    assert doubling.calls == (1 if name.startswith("joint") else 2)
    assert doubling.fetches > 0
    torch.testing.assert_close(y, 2 * plain[2](plain[1](2 * plain[0](x))))


def test_the_key_of_caches_has_all_that_is_traced(monkeypatch):
    """Also what lies outside of the folder of the pass, as what wrappers do."""
    files = []
    monkeypatch.setattr(on_device, "get_hash_for_files", lambda paths: files.extend(paths) or b"")
    on_device.OnDevice().uuid()
    package = Path(torch_offload.__file__).parent
    assert {package / name for name in ("_wrappers.py", "_optimizer.py", "compile/on_device.py")} <= {*map(Path, files)}
    assert files[-1] == torch_offload._C.__file__
