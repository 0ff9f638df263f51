"""``torch.offload`` and the device itself."""

import gc
import threading

import pytest
import torch
from helpers import COMPUTE, CPU, GPU, HOST, OFFLOAD, assert_same, passes

import torch_offload


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
    module = torch.nn.Linear(2, 2)
    assert module.offload() is module
    assert module.weight.is_offload


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


def test_device_context():
    with torch.offload.device(0):
        assert torch.offload.current_device() == 0
    with torch.offload.device("offload:0"):
        assert torch.ones(1, device="offload").device.index == 0
    torch.offload.set_device(0)
    torch.offload.set_device("offload:0")


@pytest.mark.parametrize("index", [99, 7])
def test_an_index_that_there_is_not(index):
    here = torch.offload.device_count()
    attempts = [
        lambda: torch.ones(2, device=f"offload:{index}"),
        lambda: torch.ones(2).to(f"offload:{index}"),
        lambda: torch.ones(2, device=OFFLOAD).to(f"offload:{index}"),
        lambda: torch.nn.Linear(2, 2).to(torch.device("offload", index)),
        lambda: torch.offload.set_device(index),
        lambda: torch.offload.memory_stats(index),
        lambda: torch.empty_strided((2,), (1,), device=f"offload:{index}"),
        lambda: torch.ones(2).new_zeros(2, device=f"offload:{index}"),
    ]
    for attempt in attempts:
        with pytest.raises((RuntimeError, ValueError), match=f"no device offload:{index}.*has {here}"):
            attempt()
    assert torch.ones(2, device=OFFLOAD).sum().item() == 2


def test_wrong_kinds_of_device():
    for attempt in (lambda: torch.offload.set_device("cpu"), lambda: torch.offload.device("cuda:0")):
        with pytest.raises(ValueError, match="expected an offload device"):
            attempt()


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


def test_freed_memory_can_go_back_to_the_system():
    torch.offload.empty_cache()
    before = torch.offload.memory_reserved()
    tensor = torch.empty(100 << 20, dtype=torch.uint8, device=OFFLOAD)
    assert torch.offload.memory_reserved() >= 100 << 20
    del tensor
    torch.offload.empty_cache()
    assert torch.offload.memory_reserved() <= before


def test_odd_sizes_are_not_rounded_up():
    """129.5 MB pinned bytes grow by at most 1.03 times."""
    torch.offload.empty_cache()
    before = torch.offload.memory_reserved()
    tensor = torch.empty(int(12.95e6), dtype=torch.uint8, device=OFFLOAD)
    assert torch.offload.memory_reserved() - before <= 1.03 * tensor.numel() + (2 << 20)


def test_counters_of_the_link():
    names = torch_offload.memory_stats()
    for name in ("link.bytes_to_device", "link.bytes_to_host", "cache.fetches", "cache.hits", "host_fallbacks"):
        assert name in names
    tensor = torch.ones(1024, device=OFFLOAD)
    before = torch_offload.memory_stats()["link.bytes_to_device"]
    torch.ones(1024, device=COMPUTE) + tensor
    grown = torch_offload.memory_stats()["link.bytes_to_device"] - before
    assert grown == 0 if HOST else 4096 <= grown <= 4096 + 512


def test_memory_summary():
    summary = torch.offload.memory_summary()
    assert "offload memory summary, device ID 0" in summary
    assert len({len(line) for line in summary.splitlines()}) == 1  # a table
    rows = [line.split("|")[0].strip() for line in summary.splitlines() if "|" in line]
    for row in ("Host memory allocated", "parameters", "gradients", "optimizer state", "activations", "temporary"):
        assert row in rows
    for row in ("Host memory reserved", "page-locked", "staying", "passing", "newer than the host's", "Fetches"):
        assert row in rows


def test_memory_summary_has_the_values_of_the_statistics():
    held = [torch.empty(7 << 20, dtype=torch.uint8, device=OFFLOAD), torch.empty(300, device=OFFLOAD)]
    module = torch.nn.Module()
    module.register_buffer("packed", held[0])
    stats = torch.offload.memory_stats()
    lines = torch.offload.memory_summary().splitlines()
    (parameters, count) = (line.split("|")[1].split() for line in lines if line.strip().startswith("parameters"))
    assert parameters == [str(stats["host.parameter_bytes.current"] >> 10), "KiB"]
    assert count == [str(stats["host.parameter_count.current"])]


def test_ring_bytes():
    before = torch.offload.get_ring_bytes()
    torch.offload.set_ring_bytes(1 << 20)
    assert torch.offload.get_ring_bytes() == (0 if HOST else 1 << 20)
    torch.offload.set_ring_bytes(before)
    with pytest.raises(ValueError, match="negative"):
        torch.offload.set_ring_bytes(-1)


def test_seeds():
    def draw(device):
        return torch.randn(5, device=device)

    torch.manual_seed(9)
    plain = draw(CPU)
    for seed in (torch.manual_seed, torch.offload.manual_seed, torch.offload.manual_seed_all):
        seed(9)
        if seed is not torch.manual_seed:
            torch.manual_seed(9)
        assert_same(draw(OFFLOAD), plain)
    assert torch.offload.initial_seed() == 9


def test_random_state():
    state = torch.offload.get_rng_state()
    assert state.device == CPU
    assert state.dtype == torch.uint8
    one = torch.randn(4, device=OFFLOAD), torch.rand(3, 3, device=OFFLOAD).bernoulli()
    torch.offload.set_rng_state(state)
    two = torch.randn(4, device=OFFLOAD), torch.rand(3, 3, device=OFFLOAD).bernoulli()
    assert_same(two, one)
    with pytest.raises(ValueError, match="expected a state"):
        torch.offload.set_rng_state(torch.zeros(3, dtype=torch.uint8))
    with torch.random.fork_rng(devices=[0], device_type="offload"):
        three = torch.randn(4, device=OFFLOAD)
    assert_same(torch.randn(4, device=OFFLOAD), three)


def test_generators():
    mine = torch.Generator(device="offload")
    assert mine.device.type == "offload"
    cpu = torch.Generator()
    for generator in (mine, cpu):
        generator.manual_seed(5)
    expected = torch.randn(6, generator=cpu)
    assert_same(torch.randn(6, generator=mine, device=OFFLOAD), expected)
    assert mine.initial_seed() == 5
    state = mine.get_state()
    a = torch.randn(3, generator=mine, device=OFFLOAD)
    mine.set_state(state)
    assert_same(torch.randn(3, generator=mine, device=OFFLOAD), a)
    clone = mine.clone_state()
    assert_same(torch.rand(3, generator=clone, device=OFFLOAD), torch.rand(3, generator=mine, device=OFFLOAD))
    # The CPU's own generator serves as well: the numbers are made on the host.
    cpu.manual_seed(5)
    assert_same(torch.randn(6, generator=cpu, device=OFFLOAD), expected)
    cpu.manual_seed(5)
    assert_same(torch.empty(6, device=OFFLOAD).normal_(generator=cpu), expected)
    assert_same(
        torch.multinomial(torch.ones(4, device=OFFLOAD), 2, generator=cpu).sort().values >= 0, torch.ones(2) > 0
    )


@pytest.mark.gpu
def test_cuda_generator_where_the_value_is_made_on_the_gpu():
    probabilities = torch.ones(8, device=OFFLOAD) / 8 * 1
    generator = torch.Generator(device="cuda").manual_seed(3)
    expected = torch.multinomial(probabilities.cuda(), 4, generator=torch.Generator(device="cuda").manual_seed(3))
    assert_same(torch.multinomial(probabilities, 4, generator=generator), expected)


def test_threads_have_their_own_current_device():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.offload.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


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


def test_events_and_streams_order_nothing_and_hurt_nothing():
    stream = torch.Stream(device="offload")
    event = torch.Event(device="offload")
    event.record(stream)
    event.synchronize()
    stream.synchronize()
    assert event.query()
    torch.ones(3, device=OFFLOAD).record_stream(stream)


def test_profiler():
    layer = torch.nn.Linear(4, 4).to(OFFLOAD)
    with torch.profiler.profile() as profile:
        layer(torch.ones(2, 4, device=COMPUTE)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "offload::fetch" in names
    assert "aten::linear" in names
