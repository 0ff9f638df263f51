"""Bad input gets one clear sentence, and the process stays usable."""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same, python
from torch import nn


@pytest.fixture(autouse=True)
def _usable_afterwards():
    yield
    layer = nn.Linear(4, 2).to(OFFLOAD)
    plain = nn.Linear(4, 2)
    plain.load_state_dict(layer.state_dict())
    plain.to(COMPUTE)
    x = torch.randn(3, 4).to(COMPUTE)
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert_same(layer.weight.grad, plain.weight.grad)


def fails_as_on(device, function):
    """The error of the plain device, word for word but for the devices' names."""
    try:
        function(device)
    except Exception as error:
        return error
    raise AssertionError("the plain device does not fail")


def raises_as_on(device, function):
    expected = fails_as_on(device, function)
    with pytest.raises(type(expected)) as caught:
        function(OFFLOAD)

    def first(error):
        text = re.sub(r"'?(offload|cuda|cpu)(:0)?'?", "device", str(error).splitlines()[0])
        return re.sub(r"(PrivateUse1|CUDA|CPU)", "device", text)

    assert first(caught.value) == first(expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda d: F.linear(torch.ones(2, 3, device=COMPUTE), torch.ones(4, 5, device=d)),
        lambda d: torch.ones(2, 3, device=COMPUTE) @ torch.ones(2, 3, device=d),
        lambda d: torch.ones(2, 3, device=COMPUTE) + torch.ones(2, 4, device=d),
        lambda d: F.conv2d(torch.ones(1, 3, 5, 5, device=COMPUTE), torch.ones(2, 4, 3, 3, device=d)),
        lambda d: torch.cat([torch.ones(2, 3, device=COMPUTE), torch.ones(2, 4, device=d)]),
        lambda d: F.layer_norm(torch.ones(2, 3, device=COMPUTE), (3,), torch.ones(4, device=d)),
        lambda d: torch.ones(2, 3, device=d).view(4),
        lambda d: torch.ones(2, 2, device=d).add_(torch.ones(3, device=d)),
        lambda d: torch.ones(2, device=d).backward(),
        lambda d: torch.ones(2, device=d).item(),
        lambda d: torch.ones(2, dtype=torch.int64, device=d, requires_grad=True),
        lambda d: torch.zeros(2, dtype=torch.int32, device=d).add_(1.5),
        lambda d: F.embedding(torch.tensor([0.5], device=COMPUTE), torch.ones(3, 2, device=d)),
        lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
        lambda d: torch.ones(2, requires_grad=True, device=d).add_(1),
        lambda d: torch.empty(-1, device=d),
        lambda d: torch.ones(2, 3, device=d).expand(3, 3),
        lambda d: torch.ones(2, 3, device=d).as_strided((100,), (1,)),
    ],
)
def test_the_plain_devices_error(function):
    raises_as_on(COMPUTE, function)


@pytest.mark.parametrize(
    "function",
    [
        lambda d: torch.ones(2, 3, device=d).index_select(0, torch.tensor([0.5], device=d)),
        lambda d: torch.ones(3, device=d)[torch.tensor(4, device=d)],
    ],
)
def test_a_movements_error_is_the_hosts(function):
    raises_as_on(CPU, function)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("side", ["weight", "input"])
def test_dtype_mismatch(dtype, side):
    def run(device):
        weight = torch.ones(4, 3, dtype=dtype if side == "weight" else torch.float32, device=device)
        x = torch.ones(2, 3, dtype=dtype if side == "input" else torch.float32, device=COMPUTE)
        return F.linear(x, weight)

    expected = fails_as_on(COMPUTE, run)
    with pytest.raises(type(expected), match=re.escape(str(expected).splitlines()[0])):
        run(OFFLOAD)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_layouts(layout):
    with pytest.raises((RuntimeError, NotImplementedError), match=r"offload.*(sparse|layout)|(sparse|layout).*offload"):
        torch.eye(3).to_sparse(layout=layout).to(OFFLOAD)
    with pytest.raises((RuntimeError, NotImplementedError), match="offload"):
        torch.eye(3, device=OFFLOAD).to_sparse(layout=layout)
    with pytest.raises((RuntimeError, NotImplementedError), match="offload"):
        torch.empty(3, 3, layout=layout, device=OFFLOAD)


def test_pin_memory():
    with pytest.raises(RuntimeError, match="pin_memory"):
        torch.empty(3, device=OFFLOAD, pin_memory=True)
    with pytest.raises(RuntimeError, match=r"pin|offload"):
        torch.ones(3, device=OFFLOAD).pin_memory()
    assert isinstance(torch.ones(3, device=OFFLOAD).is_pinned(), bool)


def test_numpy_of_an_offload_tensor():
    with pytest.raises(TypeError, match=r"\.cpu\(\)"):
        torch.ones(3, device=OFFLOAD).numpy()
    with pytest.raises((BufferError, RuntimeError, TypeError, ValueError)):
        torch.from_dlpack(torch.ones(3, device=OFFLOAD))


def test_a_model_of_two_kinds():
    """An offload weight among operands of the plain device is no error; a meta tensor is."""
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|same device"):
        torch.ones(2, 2, device=OFFLOAD) + torch.ones(2, 2, device="meta")


@pytest.mark.gpu
def test_three_devices():
    with pytest.raises(RuntimeError, match=r"same device.*cpu|cpu.*same device"):
        torch.addmm(torch.ones(2, 2, device=OFFLOAD), torch.ones(2, 2, device="cuda"), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="same device"):
        F.linear(torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device=OFFLOAD), torch.ones(2))


def test_too_much_memory():
    with pytest.raises(RuntimeError, match=r"(?i)offload.*(memory|bytes)") as caught:
        torch.empty(1 << 60, dtype=torch.uint8, device=OFFLOAD)
    assert str(1 << 60) in str(caught.value) or "EiB" in str(caught.value) or "GiB" in str(caught.value)
    assert isinstance(caught.value, torch.OutOfMemoryError)


def test_sizes_that_overflow():
    with pytest.raises(RuntimeError):
        torch.empty(1 << 62, 1 << 62, device=OFFLOAD)


def test_freed_storage():
    """A storage of no bytes under a tensor that has elements: what FSDP leaves between uses."""
    weight = torch.ones(4, 4, device=OFFLOAD)
    weight.untyped_storage().resize_(0)
    x = torch.ones(2, 4, device=COMPUTE)
    for use in (
        lambda: x @ weight,
        lambda: weight.sum().item(),
        lambda: weight.cpu(),
        lambda: weight + 1,
        lambda: weight.fill_(1),
    ):
        with pytest.raises(RuntimeError, match=r"storage|not allocated"):
            use()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TORCH_OFFLOAD_LINK", "nonsense", "names no link"),
        ("TORCH_OFFLOAD_LINK", "", "names no link"),
        ("TORCH_OFFLOAD_RING_BYTES", "lots", "not a whole number"),
        ("TORCH_OFFLOAD_BUDGET", "half", "not a whole number"),
        ("TORCH_OFFLOAD_RING_BYTES", "-5", "not a whole number|negative"),
        ("TORCH_OFFLOAD_RING_BYTES", "1e9", "not a whole number"),
        ("TORCH_OFFLOAD_SEED", "x", "not a whole number"),
        ("TORCH_OFFLOAD_PINNED_LIMIT", "512MB", "not a whole number"),
        ("TORCH_OFFLOAD_COPY_DELAY_US", "99999999999999999999999", "not a whole number|too large"),
    ],
)
def test_bad_settings(name, value, sentence):
    settings = {"TORCH_OFFLOAD_LINK": "sim", name: value}
    done = python(
        """
        import torch, torch_offload
        for _ in range(2):
            try:
                torch.ones(3, device="offload")
            except RuntimeError as error:
                print(str(error).splitlines()[0])
            else:
                print("no error")
        print(torch.ones(3).sum().item())
        """,
        **settings,
    )
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    if not (name == "TORCH_OFFLOAD_LINK" and value == ""):
        assert re.search(sentence, first), first
        assert name in first
        assert first == second
    else:
        assert first == "no error"  # an empty variable is one that is not set
    assert last == "3.0"


def test_cuda_link_without_a_gpu():
    done = python(
        """
        import torch, torch_offload
        try:
            torch.ones(3, device="offload")
        except RuntimeError as error:
            print(error)
        """,
        TORCH_OFFLOAD_LINK="cuda",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert "sees none here" in done.stdout


def test_memory_that_can_not_be_pinned_warns_once():
    done = python(
        """
        import torch, torch_offload, warnings
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            tensors = [torch.ones(1 << 18, device="offload") for _ in range(8)]
            total = sum(t.sum().item() for t in tensors)
            y = torch.ones(4, 1 << 18) * tensors[-1]
        told = [w for w in seen if "pin" in str(w.message) or "page-lock" in str(w.message)]
        print(int(total), int(y.sum()), len(told))
        print(torch_offload.memory_stats()["host.pinned_bytes.current"] <= 2 << 20)
        """,
        TORCH_OFFLOAD_PINNED_LIMIT=str(2 << 20),
        TORCH_OFFLOAD_LINK="auto" if GPU else "sim",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(8 << 18), str(4 << 18), "1", "True"]


def test_an_error_inside_of_a_fetched_operation_leaves_nothing_pinned():
    weight = torch.ones(64, 64, device=OFFLOAD, requires_grad=True)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.ones(2, 63, device=COMPUTE) @ weight
    assert (torch.ones(2, 64, device=COMPUTE) @ weight).sum().item() == 2 * 64 * 64


def test_errors_name_the_device_as_the_user_does():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 2, device=OFFLOAD).set_(torch.ones(2, 2))
    assert "privateuse" not in str(caught.value).lower()
    assert CPU.type in str(caught.value)
