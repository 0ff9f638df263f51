"""Models whose weights are left in their file: inference, training, copies, and a file that goes wrong."""

import copy
import io
import json
import os
import re
import textwrap

import pytest
import torch
from helpers import CACHED, COMPUTE, CPU, GPU, HOST, assert_same, at, data, deterministic, grads, layers, passes, python
from safetensors_files import raw, write, write_bytes
from torch import nn

import torch_offload


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    return write(tmp_path / "x.safetensors", dict(net().state_dict()), pad=3)  # no tensor's place is aligned


def net():
    return nn.Sequential(nn.Linear(8, 70), nn.GELU(), nn.BatchNorm1d(70), nn.Linear(70, 8))


@pytest.fixture(params=["aligned", "as in a file", "of torch.save"])
def aligned(request, tmp_path):
    """A file of a network, and that network on the CPU."""
    torch.manual_seed(0)
    plain = net()
    if request.param == "of torch.save":
        torch.save(plain.state_dict(), tmp_path / "n.pt")
        return tmp_path / "n.pt", plain
    # The second kind is 4 bytes off any address that an allocator would give.
    pad = 0 if request.param == "aligned" else 4
    return write(tmp_path / "n.safetensors", dict(plain.state_dict()), pad), plain


def from_file(path, mmap=True):
    model = net().to("offload")
    model.load_state_dict(torch_offload.load(path, mmap=mmap), assign=True)
    return model


def file_bytes():
    return torch_offload.memory_stats()["host.file_bytes.current"]


def train(model, optimizer, steps=3):
    with deterministic():
        results = []
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(data(6, 8, seed=step)).square().mean()
            loss.backward()
            results += [loss.detach(), {name: value.clone() for name, value in grads(model).items()}]
            optimizer.step()
        return [*results, dict(model.state_dict()), optimizer.state_dict()["state"]]


def test_inference_from_disk(aligned):
    path, plain = aligned
    model = from_file(path).eval()
    assert file_bytes() >= sum(parameter.nbytes for parameter in plain.parameters())
    x = data(6, 8)
    with torch.no_grad(), deterministic():
        expected = plain.to(COMPUTE).eval()(x)
        for _ in range(2):
            assert_same(model(x), expected)
            torch_offload.empty_cache()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, lambda p: torch.optim.AdamW(p, fused=True)])
def test_training_has_the_bits_of_ordinary_weights(aligned, make):
    path, plain = aligned
    before = path.read_bytes()
    expected = from_file(path, mmap=False)
    model = from_file(path)
    assert_same(train(model, make(model.parameters())), train(expected, make(expected.parameters())))
    assert path.read_bytes() == before
    assert_same(dict(torch_offload.load(path)), dict(plain.state_dict()))


def test_frozen_weights_stay_in_the_file(aligned):
    path, _ = aligned
    model = from_file(path).requires_grad_(False)
    x = data(6, 8).requires_grad_()
    model(x).sum().backward()
    ordinary = from_file(path, mmap=False).requires_grad_(False)
    y = data(6, 8).requires_grad_()
    ordinary(y).sum().backward()
    assert_same(x.grad, y.grad)


def test_misaligned_tensors_are_read_into_memory(path):
    before = file_bytes()
    loaded = torch_offload.load(path, mmap=True)
    # Only what is one byte an element could stay; there is none.
    assert file_bytes() == before
    assert_same(loaded, dict(torch_offload.load(path)))


@pytest.mark.parametrize("write_to", ["add", "copy", "copy from the device", "item", "resize"])
def test_writes_of_every_kind(aligned, write_to):
    path, plain = aligned
    before = path.read_bytes()
    weight = torch_offload.load(path, mmap=True)["0.weight"]
    expected = plain[0].weight.detach().clone()
    for tensor in (weight, expected):
        if write_to == "add":
            tensor[3:5].add_(1)
        elif write_to == "copy":
            tensor[2].copy_(at(CPU, 8))
        elif write_to == "copy from the device":
            tensor[1:3].copy_(data(2, 8).to(COMPUTE if tensor is weight else CPU))
        elif write_to == "item":
            tensor[0, 0] = 5
        else:
            tensor.resize_(80, 8)[70:] = 1
    assert_same(weight.to(COMPUTE), expected.to(COMPUTE))
    assert_same(weight, expected)
    assert path.read_bytes() == before
    rest = torch_offload.load(path, mmap=True)
    assert_same(rest, dict(plain.state_dict()))


def test_neighbours_in_one_page_are_written_apart(tmp_path):
    tensors = {f"w{k}": at(CPU, 37, seed=k) for k in range(300)}
    loaded = torch_offload.load(write(tmp_path / "x.safetensors", tensors), mmap=True)
    x = torch.ones(1, device=COMPUTE)
    for k in torch.randperm(300, generator=torch.Generator().manual_seed(0)).tolist()[:200]:
        loaded[f"w{k}"].mul_(3)
        tensors[f"w{k}"].mul_(3)
        assert_same((x * loaded[f"w{(7 * k) % 300}"]).cpu(), tensors[f"w{(7 * k) % 300}"])
    assert_same(loaded, tensors)


def test_copies_are_ordinary(aligned):
    path, plain = aligned
    model = from_file(path)
    before = file_bytes()
    for copied in (copy.deepcopy(model), {name: value.clone() for name, value in model.state_dict().items()}):
        assert file_bytes() == before
        values = copied if isinstance(copied, dict) else dict(copied.state_dict())
        assert_same(values, dict(plain.state_dict()))
    del model, copied, values
    assert file_bytes() < before


def test_save_and_state_dict(aligned):
    path, plain = aligned
    model = from_file(path)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    assert {value.device for value in saved.values()} == {CPU}
    assert_same(saved, dict(plain.state_dict()))
    again = net().to("offload")
    again.load_state_dict(model.state_dict())
    assert_same(dict(again.state_dict()), dict(plain.state_dict()))


def test_moved_to_other_devices(aligned):
    path, plain = aligned
    model = from_file(path)
    assert_same(dict(copy.deepcopy(model).to(COMPUTE).state_dict()), dict(plain.state_dict()))
    assert_same(dict(model.half().state_dict()), dict(plain.half().state_dict()))


def test_the_tensors_keep_the_file(aligned):
    path, plain = aligned
    tensors = torch_offload.load(path, mmap=True)
    path.unlink()
    path.write_bytes(b"another")
    assert_same({name: value.to(COMPUTE) for name, value in tensors.items()}, dict(plain.state_dict()))


def test_what_is_written_counts_as_memory(tmp_path):
    """Weights leave the account of files with their first write, and are in the sum from then on, and in the table."""
    size = 4 << 20
    path = write(tmp_path / "x.safetensors", {name: torch.ones(size // 4) for name in "abc"})
    program = f"""
        import gc, re, torch, torch_offload
        names = ("file", "allocated", "parameter")
        def counts(column):
            return [torch_offload.memory_stats()[f"host.{{name}}_bytes.{{column}}"] // {size} for name in names]
        def own():  # memory of this process alone, in units of a weight
            return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024 / {size}
        def row(title):
            line = next(line for line in torch_offload.memory_summary().splitlines() if title in line)
            return [cell.strip() for cell in line.split("|")[2:-1]]
        loaded = torch_offload.load({str(path)!r}, mmap=True)
        module = torch.nn.ParameterDict(loaded)
        assert counts("current") == [3, 0, 0], counts("current")
        assert row("Read from files") == ["12288 KiB", "12288 KiB", "12288 KiB", "0 B"]
        before = own()
        with torch.no_grad():
            module["a"][5] = 2
            module["a"].add_(1)
            module["b"].zero_()
        torch_offload.synchronize()
        assert torch_offload._C.backend() != "host" or 2 <= own() - before < 2.75, own() - before
        assert counts("current") == [1, 2, 2], counts("current")
        assert counts("peak") == [3, 2, 2]
        assert counts("allocated") == [3, 2, 2]
        assert counts("freed") == [2, 0, 0]
        assert row("Read from files") == ["4096 KiB", "12288 KiB", "12288 KiB", "8192 KiB"]
        assert row("Host memory allocated")[0] == row("parameters")[0] == "8192 KiB"
        assert row("Shared between processes")[0] == "0 B"
        module["c"].share_memory_()
        assert counts("current") == [0, 3, 3], counts("current")
        shared = torch_offload.memory_stats()["host.shared_bytes.current"]
        assert row("Shared between processes")[0] == f"{{shared >> 10}} KiB" and 0 < shared - {size} <= 8192
        del loaded, module["a"]
        gc.collect()
        assert counts("current") == [0, 2, 2], counts("current")
        assert torch_offload._C.backend() != "host" or own() - before < 1.75, own() - before
        assert module["b"].sum().item() == 0
    """
    passes(program)


@pytest.mark.parametrize("use", ["fetch", "host", "write"])
def test_a_file_that_was_cut(aligned, use):
    path, plain = aligned
    tensors = torch_offload.load(path, mmap=True)
    written = tensors["3.weight"]
    written.add_(1)
    os.truncate(path, 100)
    weight = tensors["0.weight"]
    sentence = re.escape(f"{path} was changed while tensors are read from it") + ".* and has 100 now"
    calls = {
        "fetch": lambda: weight.to(COMPUTE) if GPU else nn.functional.linear(data(2, 8), weight),
        "host": lambda: weight[0, 0].item(),
        "write": weight.zero_,
    }
    with pytest.raises(RuntimeError, match=sentence):
        calls[use]()
    # What has memory of its own is whole, and so is everything else.
    assert_same(written.to(COMPUTE), (plain[3].weight.detach() + 1).to(COMPUTE))
    assert_same(layers().to("offload")(data(3, 8)).shape, torch.Size([3, 8]))


FAILING = """
    import os, torch, torch_offload
    from torch_offload import synchronize
    x = torch.ones(1, device=torch_offload._C.paired_device(0))
    other = torch.ones(3, device="offload")
    (x * other).sum().item()
    weight = torch_offload.load({path!r}, mmap=True)["a"]
    opened = {{fd: os.path.realpath(f"/proc/self/fd/{{fd}}") for fd in range(3, 100)}}
    descriptor = next(fd for fd, name in opened.items() if name == {path!r})
    kept, folder = os.dup(descriptor), os.open({folder!r}, os.O_RDONLY)
    os.dup2(folder, descriptor)
    result = x * weight
    assert result.isnan().all()
    os.dup2(kept, descriptor)
"""


@pytest.fixture
def failing(tmp_path):
    """A program in which a read fails behind a fetch's back, and the sentence for it."""
    # A folder in the place of the open file: it can't be read, but looks as the file did, of the same size and time.
    folder = tmp_path / "folder"
    folder.mkdir()
    size = folder.stat().st_size
    if size < 1000:
        pytest.skip(f"folders of this file system have {size} bytes, less than a safetensors file")
    text = json.dumps({"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}})
    path = write_bytes(tmp_path / "x.safetensors", text + " " * (size - 408 - len(text)), raw(torch.ones(100)))
    os.utime(folder, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    sentence = f"offload: of the 400 bytes from byte {size - 400} of {path} only 0 could be read: Is a directory."
    return textwrap.dedent(FAILING).format(path=str(path.resolve()), folder=str(folder)), sentence


@pytest.mark.skipif(not CACHED, reason="nothing is read in the background")
@pytest.mark.parametrize("tell", ["synchronize()", "x * other", "other.sum().item()", "other.add_(1)"])
def test_a_read_that_fails_in_the_background_is_told_once(failing, tell):
    program, sentence = failing
    said = passes(
        program
        + textwrap.dedent(f"""
            try:
                {tell}
                raise SystemExit("nothing was said")
            except RuntimeError as error:
                print(error)
            {tell}
            assert (x * weight == 1).all() and (weight == 1).all()
        """)
    )
    assert sentence in said
    assert "NaN" in said


@pytest.mark.skipif(not CACHED, reason="nothing is read in the background")
def test_a_read_that_fails_in_the_background_is_told_at_exit(failing):
    program, sentence = failing
    assert sentence in python(program).stderr


def test_fork():
    program = """
        import os, sys, torch, torch_offload
        from safetensors_files import raw, write, write_bytes
        from pathlib import Path
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "x.safetensors", {"a": torch.arange(5000.0), "b": torch.ones(3)})
            tensors = torch_offload.load(path, mmap=True)
            tensors["b"].add_(1)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    tensors["a"].mul_(2)
                    assert tensors["a"].sum().item() == 2 * 4999 * 2500 and tensors["b"].sum().item() == 6
                    status = 0
                except RuntimeError as error:
                    status = 3 if "forked" in str(error) else 1
                finally:
                    os._exit(status)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            assert tensors["a"].sum().item() == 4999 * 2500 and tensors["b"].sum().item() == 6
    """
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    assert passes(program, PYTHONPATH=path) == ("0\n" if HOST else "3\n")


def test_exit_while_bytes_are_read(tmp_path):
    path = write(tmp_path / "x.safetensors", {f"w{k}": torch.ones(1 << 18) for k in range(8)})
    program = f"""
        import torch, torch_offload
        tensors = torch_offload.load({str(path)!r}, mmap=True)
        x = torch.ones(1, device=torch_offload._C.paired_device(0))
        results = [x * tensor for tensor in tensors.values()]
    """
    for _ in range(3):
        passes(program)
