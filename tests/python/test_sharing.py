"""Tensors whose bytes several processes use."""

import copy
import gc
import io
import os
import pickle
import textwrap
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from helpers import CACHED, COMPUTE, CPU, OFFLOAD, assert_same, at, data, grads, layers, passes
from torch import nn

SCENARIOS = [
    "one_copy",
    "writes_between_forwards",
    "writes_of_a_child",
    "writes_of_a_child_into_a_result",
    "hogwild",
    "aliases",
    "results_of_a_child",
    "data_loader",
    "lifetime",
    "many",
    "too_many",
    "many_arguments",
    "killed",
]


def run(scenario: str, method: str) -> None:
    here = os.path.dirname(__file__)
    passes(
        f"import sys; sys.path.insert(0, {here!r}); import sharing_scenarios; sharing_scenarios.run({scenario!r}, {method!r})"
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_spawned(scenario):
    run(scenario, "spawn")


@pytest.mark.skipif(CACHED, reason="there is a device that does not survive a fork")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_forked(scenario):
    run(scenario, "fork")


@pytest.mark.parametrize("scenario", ["writes_between_forwards", "aliases"])
def test_from_a_fork_server(scenario):
    run(scenario, "forkserver")


@pytest.mark.parametrize("scenario", ["names_of_files", "writes_without_a_device"])
def test_spawned_otherwise(scenario):
    run(scenario, "spawn")


@pytest.mark.skipif(not CACHED, reason="plain host memory survives a fork")
@pytest.mark.parametrize("scenario", ["fork_after_use", "data_loader_refused"])
def test_fork_beside_a_device(scenario):
    run(scenario, "fork")


def test_sharing_moves_the_bytes_and_nothing_else():
    value = at(OFFLOAD, 3, 4)
    row, turned, held = value[1], value.t(), value.untyped_storage()
    before = value.data_ptr()
    version = value._version
    assert [t.is_shared() for t in (value, row, turned, held)] == [False] * 4
    assert row.share_memory_() is row
    assert [t.is_shared() for t in (value, row, turned, held)] == [True] * 4
    assert value.data_ptr() != before
    assert row.data_ptr() == value.data_ptr() + 16
    assert turned.data_ptr() == held.data_ptr() == value.data_ptr()
    assert value._version == version
    assert_same([value, row, turned], [at(CPU, 3, 4), at(CPU, 3, 4)[1], at(CPU, 3, 4).t()])
    moved = value.data_ptr()
    value.share_memory_()
    assert value.data_ptr() == moved
    row.fill_(5)
    assert value[1].tolist() == [5.0] * 4


def test_module_keeps_parameters_ties_and_optimizer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    net[2].weight = net[0].weight
    plain = copy.deepcopy(net).to(COMPUTE)
    net.to(OFFLOAD)
    pairs = [(m, torch.optim.AdamW(m.parameters())) for m in (net, plain)]
    parameters = list(net.parameters())
    for _ in range(2):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(data(4, 8)).square().sum().backward()
            if optimizer.param_groups[0]["params"][0].device.type != "offload":
                continue
            assert model.share_memory() is model
            assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
            assert all(t.is_shared() for t in model.state_dict().values())
            assert all(g.is_shared() for g in grads(model).values())  # as a CPU module's
            optimizer.step()
        assert_same(grads(net), grads(plain))
        plain.load_state_dict(net.state_dict())
    assert net[0].weight is net[2].weight


@pytest.mark.parametrize("device", [COMPUTE, CPU])
def test_sharing_between_forward_and_backward(device):
    """What autograd saved is the value that there was, wherever its bytes are by then."""
    torch.manual_seed(0)
    net = layers(2)
    plain = copy.deepcopy(net).to(device)
    net.to(OFFLOAD)
    results = [m(data(2, 8, device=device)).square().sum() for m in (net, plain)]
    net.share_memory()
    filler = [torch.full((8, 8), 9.0, device=OFFLOAD) for _ in range(50)]  # what was let go of is used again
    for result in results:
        result.backward()
    assert_same(grads(net), grads(plain))
    assert filler[0].sum().item() == 9 * 64


def test_sharing_what_is_on_the_device_alone():
    before = torch.offload.memory_stats()["device.dirty_bytes.current"]  # other tests' results, which nobody has read
    value = at(OFFLOAD, 40, 40) + 1
    value.share_memory_()
    value.mul_(2)
    assert_same(value, (at(CPU, 40, 40) + 1) * 2)
    assert torch.offload.memory_stats()["device.dirty_bytes.current"] <= before


def test_copies_are_private():
    shared = at(OFFLOAD, 3, 4).share_memory_()
    file = io.BytesIO()
    torch.save(shared, file)
    file.seek(0)
    copies = [copy.deepcopy(shared), shared.clone(), pickle.loads(pickle.dumps(shared)), torch.load(file), shared + 0]
    assert_same(copies, [at(CPU, 3, 4)] * 5)
    assert [c.is_shared() for c in copies] == [False] * 5
    assert copy.deepcopy(nn.Linear(2, 2).to(OFFLOAD).share_memory()).weight.is_shared() is False


def test_resizing_is_refused():
    shared = at(OFFLOAD, 3, 4).share_memory_()
    for resize in (lambda: shared.resize_(100), lambda: shared.untyped_storage().resize_(0)):
        with pytest.raises(RuntimeError, match=r"48 bytes is shared between processes and can't be resized to \d+"):
            resize()
    shared.resize_(3, 4)
    assert_same(shared, at(CPU, 3, 4))


def test_nothing_to_share():
    empty = torch.empty(0, 3, device=OFFLOAD)
    assert empty.share_memory_().is_shared()
    assert torch.empty(0).share_memory_().is_shared()


def test_what_requires_grad_and_is_no_leaf_is_not_sent():
    for device in (CPU, OFFLOAD):
        value = at(device, 3).requires_grad_() * 2
        with pytest.raises(RuntimeError, match="non-leaf tensor"):
            ForkingPickler.dumps(value)


def test_other_devices_are_shared_as_before():
    plain = torch.ones(3)
    assert not plain.is_shared()
    assert plain.share_memory_().is_shared()
    assert not torch.ones(3).untyped_storage().is_shared()
    again = pickle.loads(ForkingPickler.dumps(plain))
    again.add_(1)
    assert plain.tolist() == [2.0] * 3
    assert b"torch_offload" not in bytes(ForkingPickler.dumps(plain))


def test_statistics():
    gc.collect()
    torch.offload.empty_cache()
    before = torch.offload.memory_stats()
    value = torch.ones(1 << 20, device=OFFLOAD).share_memory_()
    now = torch.offload.memory_stats()
    assert 0 <= now["host.shared_bytes.current"] - before["host.shared_bytes.current"] - value.nbytes <= 1 << 17
    assert now["host.allocated_bytes.current"] - before["host.allocated_bytes.current"] == value.nbytes
    del value
    gc.collect()
    torch.offload.empty_cache()
    after = torch.offload.memory_stats()
    for name in ("host.shared_bytes.current", "host.allocated_bytes.current", "host.pinned_bytes.current"):
        assert after[name] == before[name], name


def test_descriptors_go_with_their_tensors():
    gc.collect()
    torch.offload.empty_cache()
    before = len(os.listdir("/proc/self/fd"))
    values = [torch.ones(10, device=OFFLOAD).share_memory_() for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before + 20
    del values
    gc.collect()
    torch.offload.empty_cache()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_that_share_one_tensor():
    for _ in range(10):
        value = at(OFFLOAD, 100, 100)
        addresses = []

        def share(value=value, addresses=addresses):
            addresses.append(value.share_memory_().data_ptr())

        threads = [threading.Thread(target=share) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert addresses == [value.data_ptr()] * 4
        assert_same(value, at(CPU, 100, 100))


LIMITED = """
    import os, re, resource, torch, torch_offload
    assert torch.ones(1, device="offload").sum().item() == 1
    def descriptors():
        return len(os.listdir("/proc/self/fd"))
    have = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (have + 20, have + {hard}))
    values = [torch.full((3,), float(k), device="offload") for k in range(100)]
"""


def test_more_storages_than_the_soft_limit_of_descriptors():
    passes(
        textwrap.dedent(LIMITED.format(hard=600))
        + textwrap.dedent("""
            for value in values:
                value.share_memory_()
            assert descriptors() == have + 100
            assert [v.tolist() for v in values] == [[float(k)] * 3 for k in range(100)]
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert have + 132 < soft <= have + 600 == hard  # no more than is wanted
        """)
    )


def test_more_storages_than_the_hard_limit_of_descriptors():
    """Those that can't be shared are as they were, and the program has descriptors of its own left."""
    passes(
        textwrap.dedent(LIMITED.format(hard=80))
        + textwrap.dedent(r"""
            bare = [v.data_ptr() for v in values]
            module = torch.nn.ParameterList(values)
            def refused():
                try:
                    module.share_memory()
                except RuntimeError as error:
                    return str(error)
            told = refused()
            shared = [v.is_shared() for v in module]
            count = sum(shared)
            assert 40 <= count <= 50 and shared == [True] * count + [False] * (100 - count)
            sentence = (
                rf"offload: a storage that processes share takes a file descriptor in each of them, and this one has "
                rf"(\d+) open of the {have + 80} that it may have, of which 32 are left to the rest of the program: .*\."
            )
            assert int(re.fullmatch(sentence, told)[1]) == have - 1 + count  # without the one that lists them
            assert [v.tolist() for v in module] == [[float(k)] * 3 for k in range(100)]
            assert [v.data_ptr() for v in module][count:] == bare[count:]
            with torch.no_grad():
                for v in module:
                    v.add_(1)
            assert [v.tolist() for v in module] == [[k + 1.0] * 3 for k in range(100)]
            mine = [open("/dev/null") for _ in range(31)]
            assert refused() and sum(v.is_shared() for v in module) == count
            del mine, values[:10], v
            module = torch.nn.ParameterList(list(module)[10:])
            torch.offload.empty_cache()
            assert refused() and sum(v.is_shared() for v in module) == count
        """)
    )
