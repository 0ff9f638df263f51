"""``torch.offload`` and the device itself."""

import ast
import gc
import os
import time
from pathlib import Path

import pytest
import torch
from helpers import CACHED, COMPUTE, GPU, HOST, OFFLOAD, assert_same, passes

import torch_offload
from torch_offload import _summary


def test_names():
    for name in ("offload", "offload:0", OFFLOAD, torch.device("offload", 0)):
        assert torch.ones(2, device=name).device == torch.device("offload", 0)
    assert str(torch.device("offload:0")) == "offload:0"
    assert torch.device("offload").index is None
    assert torch.ones(2).to("offload").device.index == 0
    assert torch.ones(2, device=OFFLOAD).get_device() == 0


def test_repr():
    assert repr(torch.tensor([1.0, 2.0], device=OFFLOAD)) == "tensor([1., 2.], device='offload:0')"
    assert repr(torch.tensor(1, device=OFFLOAD)) == "tensor(1, device='offload:0')"
    assert "offload" in repr(torch.nn.Parameter(torch.ones(1, device=OFFLOAD)))
    assert "grad_fn" in repr(torch.ones(2, device=OFFLOAD, requires_grad=True) * 2)
    assert "device='offload:0'" in repr(torch.ones(1000, device=OFFLOAD))
    assert "size=(0,)" not in repr(torch.ones(3, device=OFFLOAD))
    assert f"{torch.tensor(2.5, device=OFFLOAD):.2f}" == "2.50"


def test_is_offload():
    tensor = torch.ones(2, device=OFFLOAD)
    assert tensor.is_offload
    assert not torch.ones(2).is_offload
    assert not tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.layout == torch.strided
    assert tensor.untyped_storage().is_offload


def test_offload_methods():
    plain = torch.arange(3.0)
    there = plain.offload()
    assert there.device == torch.device("offload:0")
    assert_same(there, plain)
    assert there.offload() is there
    assert plain.offload(0).device == torch.device("offload:0")
    assert plain.offload(non_blocking=True).device.type == "offload"
    assert_same(there.cpu(), plain)


def test_device_module():
    assert torch.offload is torch.get_device_module("offload")
    assert torch.offload.is_available()
    assert torch.offload.is_initialized()
    assert torch.offload.device_count() == (torch.cuda.device_count() if GPU else 1)
    assert torch.offload.current_device() == 0
    assert isinstance(torch.offload.get_device_name(), str)
    assert (torch.offload.get_device_properties() is None) == (not GPU)
    torch.offload.synchronize()
    torch.offload.synchronize("offload:0")
    torch.offload.empty_cache()
    assert torch.float16 in torch.offload.get_amp_supported_dtype()
    assert torch.offload.current_stream().device.type == "offload"


def test_nested_memory_statistics():
    flat, nested = torch.offload.memory_stats(), torch.offload.memory_stats_as_nested_dict("offload:0")
    for name, value in flat.items():
        found = nested
        for part in name.split("."):
            found = found[part]
        assert type(found) is type(value), name
    assert nested["host"]["allocated_bytes"].keys() == {"current", "peak", "allocated", "freed"}
    assert nested["host"]["allocated_bytes"]["current"] == torch.offload.memory_allocated()


def test_capabilities_are_those_of_the_device_that_computes():
    assert torch.offload.init() is None
    assert torch.offload.get_device_capability() == (torch.cuda.get_device_capability(0) if GPU else (0, 0))
    assert torch.offload.get_device_capability("offload:0") >= (0, 0)
    assert torch.offload.is_bf16_supported() == (torch.cuda.is_bf16_supported() if GPU else True)


def test_host_memory():
    """(free, total) in bytes: what the machine has, or the container where that has less."""
    free, total = torch.offload.mem_get_info()
    assert 1 << 28 < total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free < total - torch.offload.memory_stats()["host.pinned_bytes.current"]
    assert torch.offload.mem_get_info("offload:0")[1] == total
    with pytest.raises(ValueError, match="no device offload:7"):
        torch.offload.mem_get_info(7)


def test_memory_statistics():
    gc.collect()
    torch.offload.empty_cache()
    torch.offload.reset_peak_memory_stats()
    before = torch.offload.memory_allocated()
    tensor = torch.empty(3 << 20, dtype=torch.uint8, device=OFFLOAD)
    assert 3 << 20 <= torch.offload.memory_allocated() - before <= (3 << 20) * 1.03
    assert torch.offload.memory_reserved() >= torch.offload.memory_allocated()
    del tensor
    assert torch.offload.memory_allocated() == before
    assert torch.offload.max_memory_allocated() - before >= 3 << 20
    assert torch.offload.max_memory_reserved() >= torch.offload.max_memory_allocated()
    torch.offload.reset_peak_memory_stats()
    assert torch.offload.max_memory_allocated() == torch.offload.memory_allocated()


def test_accumulated_statistics_begin_anew():
    gc.collect()
    held, gone = torch.ones(1 << 18, device=OFFLOAD), torch.ones(1 << 18, device=OFFLOAD)
    assert (torch.ones(1 << 18, device=COMPUTE) + held + gone)[0].item() == 3
    del gone
    torch.offload.empty_cache()
    before = torch.offload.memory_stats()
    for name in ("host.allocated_bytes.freed", "host.temporary_count.freed"):
        assert before[name] > 0
    assert (before["device.slot_bytes.freed"] > 0) == CACHED
    peak = torch.offload.max_memory_allocated()
    torch.offload.reset_accumulated_memory_stats()
    stats = torch.offload.memory_stats()
    names = [name.removesuffix(".freed") for name in stats if name.endswith(".freed")]
    assert "host.allocated_bytes" in names
    for name in names:
        assert stats[f"{name}.freed"] == 0, name
        assert stats[f"{name}.allocated"] == stats[f"{name}.current"], name
    assert stats["host.allocated_bytes.peak"] == peak
    del held
    assert torch.offload.memory_stats()["host.allocated_bytes.freed"] == 1 << 20


def test_freed_memory_can_go_back_to_the_system():
    torch.offload.empty_cache()
    before = torch.offload.memory_reserved()
    tensor = torch.empty(100 << 20, dtype=torch.uint8, device=OFFLOAD)
    assert torch.offload.memory_reserved() >= 100 << 20
    del tensor
    torch.offload.empty_cache()
    assert torch.offload.memory_reserved() <= before


@pytest.mark.parametrize("size", [1_295_000, 12_950_000, 129_500_000])
def test_odd_sizes_are_not_rounded_up(size):
    """What is reserved for four tensors of an odd size is at most 1.03 times what they ask for."""
    passes(
        f"""
        import torch, torch_offload
        tensors = [torch.empty({size}, dtype=torch.uint8, device="offload") for _ in range(4)]
        reserved = torch.offload.memory_reserved()
        assert 4 * {size} <= reserved <= 1.03 * 4 * {size}, reserved / 4 / {size}
        """
    )


def test_counters_of_the_link():
    names = torch_offload.memory_stats()
    for name in ("link.bytes_to_device", "link.bytes_to_host", "cache.fetches", "cache.hits", "host_fallbacks"):
        assert name in names
    tensor = torch.ones(1024, device=OFFLOAD)
    before = torch_offload.memory_stats()["link.bytes_to_device"]
    torch.ones(1024, device=COMPUTE) + tensor
    grown = torch_offload.memory_stats()["link.bytes_to_device"] - before
    assert grown == 0 if HOST else 4096 <= grown <= 4096 + 512


def test_stats():
    """The same counters without the memory."""
    weight = torch.ones(1024, device=OFFLOAD)
    before = torch_offload.stats()
    for _ in range(2):
        torch.ones(1024, device=COMPUTE) + weight
    weight.add_(1)
    after = torch_offload.stats()
    assert after["fetches"] - before["fetches"] == (0 if HOST else 2)
    assert after["hits"] - before["hits"] == (0 if HOST else 1)
    assert after["bytes_to_device"] - before["bytes_to_device"] == (0 if HOST else 4096)
    assert after["stalls"] >= before["stalls"] >= 0
    assert after["host_waits"] >= before["host_waits"]
    assert after["host_wait_seconds"] >= before["host_wait_seconds"]
    assert after["host_fallbacks"] == before["host_fallbacks"]
    assert not any(name.startswith("host.") for name in after)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the GPU stands still")
def test_stalls():
    """A stream without work waits for most of the copies that it asks for, and for none of what it has."""
    weights = [torch.ones(1 << 22, device=OFFLOAD) for _ in range(8)]

    def added_up():
        torch.cuda.synchronize()
        before, begin = torch_offload.stats(), time.perf_counter()
        for weight in weights:
            total = weight + torch.ones((), device=COMPUTE)
            torch.cuda.synchronize()
            assert total[-1].item() == 2
        after, taken = torch_offload.stats(), time.perf_counter() - begin
        waited = after["stall_seconds"] - before["stall_seconds"]
        assert 0 <= waited < taken
        return after["stalls"] - before["stalls"], waited

    stalls, waited = added_up()
    assert 1 <= stalls <= len(weights)
    assert waited > 10e-6 * stalls
    torch_offload.synchronize()
    assert added_up() == (0, 0)


@pytest.mark.skipif(HOST, reason="nothing travels")
def test_a_column_of_a_large_tensor_is_said_to_travel_with_the_rest():
    told = passes(
        """
        import torch, torch_offload, warnings
        large = torch.ones(1024, 8192, device="offload")
        plain = torch.ones(1024).to("cuda" if torch.cuda.is_available() else "cpu")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            plain + large.t()[:1024, 0]  # a row, whose bytes lie together
            plain[:4, None] + large[:4]
            assert not seen, seen[0].message
            assert torch_offload.stats()["excess_bytes"] == {}
            for _ in range(2):
                plain + large[:, 0]
                torch.mul(plain, large[:, 0])
        for warning in seen:
            print(str(warning.message).splitlines()[0])
        print(torch_offload.stats()["excess_bytes"])
        """
    )
    *sentences, counted = told.splitlines()
    assert [sentence.split()[1] for sentence in sentences] == ["aten::add", "aten::mul"]
    for sentence in sentences:
        assert "shape [1024] and strides [8192], whose 4096 bytes lie apart: all 33521668 bytes" in sentence
    once = 33521668 - 4096
    assert ast.literal_eval(counted) == {"aten::add": 2 * once, "aten::mul": 2 * once}


def rows_of(summary):
    """The cells of each row by its title; of titles that come twice, a list."""
    rows = {}
    for line in summary.splitlines():
        title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) == 4:
            rows.setdefault(title, []).append(cells)
    return rows


PURPOSES = ("parameters", "gradients", "optimizer state", "activations", "temporary")


@pytest.mark.parametrize("abbreviated", [False, True])
def test_memory_summary(abbreviated):
    summary = torch.offload.memory_summary(abbreviated=abbreviated)
    assert "offload memory summary, device ID 0" in summary
    assert len({len(line) for line in summary.splitlines()}) == 1  # a table
    assert all(line[0] == line[-1] == "|" for line in summary.splitlines())
    rows = rows_of(summary)
    assert rows["Metric"] == [["Cur Usage", "Peak Usage", "Tot Alloc", "Tot Freed"]]
    for row in ("Host memory allocated", "Host memory reserved", "Storages", "GPU memory of the cache"):
        assert all(rows[row][0])
    assert "Rings for pageable copies" in rows
    for row in (*PURPOSES, "page-locked", "staying", "passing", "newer than the host's", "in use"):
        assert (row in rows) == (not abbreviated)
    for title in (
        "Budget for what stays: ",
        "Ring for what passes: ",
        "Fetches: ",
        "found on the GPU: ",
        "To the GPU: ",
    ):
        assert title in summary


def test_what_has_come_and_gone_adds_up():
    gc.collect()
    kinds = ("parameter", "gradient", "optimizer", "activation", "temporary")
    before = torch.offload.memory_stats()
    size = 3 << 20
    module = torch.nn.Module()
    module.register_buffer("packed", torch.empty(size, dtype=torch.uint8, device=OFFLOAD))
    held = [torch.empty(size, dtype=torch.uint8, device=OFFLOAD) for _ in range(2)]
    del held[0]
    torch.offload.reset_peak_memory_stats()
    after = torch.offload.memory_stats()

    def grown(name):
        return after[name] - before[name]

    assert grown("host.allocated_bytes.allocated") == 3 * size
    assert grown("host.allocated_bytes.freed") == size
    assert grown("host.allocated_count.allocated") == 3
    assert grown("host.parameter_bytes.allocated") == size
    assert grown("host.temporary_bytes.allocated") == 2 * size
    assert grown("host.temporary_bytes.freed") == size
    assert grown("host.parameter_bytes.freed") == 0
    for what in ("bytes", "count"):
        for column in ("current", "allocated", "freed"):
            assert (
                sum(after[f"host.{kind}_{what}.{column}"] for kind in kinds) == after[f"host.allocated_{what}.{column}"]
            )
    for name in ("host.allocated_bytes", "host.reserved_bytes", "host.parameter_count", "device.slot_bytes"):
        assert after[f"{name}.allocated"] - after[f"{name}.freed"] == after[f"{name}.current"]


@pytest.mark.parametrize(("count", "size", "number"), [
    (0, "0 B", "0"), (5000, "5000 B", "5000"), (768 << 10, "768 KiB", "786 K"), (5 << 30, "5120 MiB", "5368 M"),
    (3 << 60, "3072 PiB", None),
])  # fmt: skip
def test_numbers_of_a_summary(count, size, number):
    assert _summary._size(count).strip() == size
    assert number is None or _summary._count(count).strip() == number


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_an_empty_cache_holds_nothing():
    """What passes, stays, is newer on the device or copied ahead, and the rings; the next use makes it again."""
    passes(
        f"""
        import torch, torch_offload, warnings
        warnings.simplefilter("ignore")
        torch_offload.set_ring_bytes(4 * 64 * 64 * 4)
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).to("offload")
        x = torch.ones(2, 64, device="{COMPUTE}")
        truth = [net(x).sum().item(), (net[0].weight @ net[1].weight).sum().item()]
        held = ("device.slot_bytes.current", "host.ring_bytes.current")
        for budget in (0, "auto", 10 * 64 * 64 * 4):
            torch_offload.set_budget(budget)
            for _ in range(3):
                y = net(x)
                product = net[0].weight @ net[1].weight
            before = torch_offload.memory_stats()
            assert all(before[name] > 0 for name in held), before
            torch_offload.empty_cache()
            after = torch_offload.memory_stats()
            assert not any(after[name] for name in held), after
            if torch.cuda.is_available():
                assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 2 << 20
            y.sum().backward()
            assert [net(x).sum().item(), product.sum().item()] == truth
        """,
        TORCH_OFFLOAD_PINNED_LIMIT="0",
    )


def test_the_limit_on_page_locked_memory_leaves_the_rings_out():
    """Nothing of tensors is page-locked; copies go through 32 MiB for each direction, and the statistics tell that."""
    out = passes(
        """
        import torch, torch_offload, warnings
        warnings.simplefilter("ignore")
        def tell():
            stats = torch.offload.memory_stats()
            row = next(line for line in torch.offload.memory_summary().splitlines() if "Rings" in line)
            print(stats["host.pinned_bytes.current"], stats["host.ring_bytes.current"], *row.split("|")[2].split())
        w = torch.ones(64, 64, device="offload")
        tell()
        torch.ones(2, 64, device="cuda" if torch.cuda.is_available() else "cpu") @ w
        tell()
        assert (w @ w).sum().item() == 64**3
        tell()
        """,
        TORCH_OFFLOAD_PINNED_LIMIT="" if HOST else "0",
        TORCH_OFFLOAD_BUDGET="" if HOST else "0",
    )
    rings = [0, 0, 0] if HOST else [0, 32 << 20, 64 << 20]
    units = [(ring, "KiB" if ring else "B") for ring in rings]
    assert out.splitlines() == [f"0 {ring} {ring >> 10} {unit}" for ring, unit in units]


def test_memory_summary_has_the_values_of_the_statistics():
    held = [torch.empty(7 << 20, dtype=torch.uint8, device=OFFLOAD), torch.empty(300, device=OFFLOAD)]
    module = torch.nn.Module()
    module.register_buffer("packed", held[0])
    stats = torch.offload.memory_stats()
    rows = rows_of(torch.offload.memory_summary())
    names = ("current", "peak", "allocated", "freed")
    sizes, counts = rows["parameters"]
    assert sizes == [_summary._size(stats[f"host.parameter_bytes.{name}"]).strip() for name in names]
    assert counts == [_summary._count(stats[f"host.parameter_count.{name}"]).strip() for name in names]
    assert sizes[0].split()[0] != "0"


def test_ring_bytes():
    before = torch.offload.get_ring_bytes()
    torch.offload.set_ring_bytes(1 << 20)
    assert torch.offload.get_ring_bytes() == (0 if HOST else 1 << 20)
    torch.offload.set_ring_bytes(before)
    with pytest.raises(ValueError, match="0 or more"):
        torch.offload.set_ring_bytes(-1)


def test_importing_twice_and_after_use():
    passes(
        """
        import torch
        before = torch.ones(3)
        import torch_offload, importlib
        import torch_offload as again
        assert again is torch_offload
        assert before.to("offload").sum().item() == 3
        """
    )


def test_version_and_public_names():
    assert torch_offload.__version__
    assert (Path(torch_offload.__file__).parent / "py.typed").exists()  # its annotations are for others, too
    for name in torch_offload.__all__:
        assert getattr(torch_offload, name).__doc__ or name.startswith("__")


def test_data_loader_moves_batches():
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(6, 2))
    seen = [batch.to("offload") for (batch,) in torch.utils.data.DataLoader(data, batch_size=2)]
    assert_same(torch.cat(seen), torch.arange(12.0).view(6, 2))


def test_data_loader_over_offload_tensors():
    data = torch.utils.data.TensorDataset(torch.arange(12.0, device=OFFLOAD).view(6, 2))
    seen = [batch for (batch,) in torch.utils.data.DataLoader(data, batch_size=2)]
    assert all(batch.device.type == "offload" for batch in seen)
    assert_same(torch.cat(seen), torch.arange(12.0).view(6, 2))


def test_profiler():
    layer = torch.nn.Linear(4, 4).to(OFFLOAD)
    with torch.profiler.profile() as profile:
        layer(torch.ones(2, 4, device=COMPUTE)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "offload::fetch" in names
    assert "aten::linear" in names
