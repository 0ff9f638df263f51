"""Bad input gets one clear sentence, and the process stays usable."""

import re

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same, python, says
from torch import nn

import torch_offload


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


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.complex32, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex64], ids=str
)
@pytest.mark.parametrize("side", ["weight", "both", "all"])
def test_dtypes_of_linear(dtype, side):
    """The plain device's value, or its error."""

    def run(device):
        weight = torch.ones(16, 16).to(dtype).to(device)
        x = torch.ones(16, 16).to(torch.float32 if side == "weight" else dtype)
        return F.linear(x.to(device if side == "all" else COMPUTE), weight)

    try:
        expected = run(COMPUTE)
    except Exception:
        if not (GPU and side == "all"):  # on the GPU, what offload alone can't have there is made on the host
            raises_as_on(COMPUTE, run)
    else:
        assert_same(run(OFFLOAD), expected)


@pytest.mark.gpu
def test_three_devices():
    with pytest.raises(RuntimeError, match=r"same device.*cpu|cpu.*same device"):
        torch.addmm(torch.ones(2, 2, device=OFFLOAD), torch.ones(2, 2, device="cuda"), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="same device"):
        F.linear(torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device=OFFLOAD), torch.ones(2))


@pytest.mark.parametrize("bytes", [1 << 60, 1 << 45])
def test_too_much_memory(bytes):
    """Also where the kernel would give out as many, and kill somebody when they are written."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(bytes, dtype=torch.uint8, device=OFFLOAD)
    found = re.fullmatch(
        rf"offload: the host is out of memory. The system refused {bytes} bytes; \d+ bytes are in use by offload tensors and "
        r"\d+ are cached, and this machine or container has (\d+), swap included: free tensors, or use a machine with more "
        r"memory\.",
        str(caught.value),
    )
    assert found
    assert int(found[1]) < bytes


def test_sizes_that_overflow():
    with pytest.raises(
        RuntimeError, match=r"^Storage size calculation overflowed with sizes=\[4611686018427387904, 46"
    ):
        torch.empty(1 << 62, 1 << 62, device=OFFLOAD)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: torch.ones(2, 4, device=COMPUTE) @ weight,
        lambda weight: weight.sum().item(),
        torch.Tensor.cpu,
        lambda weight: weight + 1,
        lambda weight: weight.fill_(1),
    ],
    ids=["beside compute", "sum", "cpu", "add", "fill_"],
)
def test_freed_storage(use):
    """A storage of no bytes under a tensor that has elements: what FSDP leaves between uses."""
    weight = torch.ones(4, 4, device=OFFLOAD)
    weight.untyped_storage().resize_(0)
    sentence = "offload: a tensor of shape [4, 4] needs 64 bytes of its storage, which has 0; the storage was resized or freed."
    says(RuntimeError, sentence, lambda: use(weight))


def not_whole(name, value, least=0, most=2**64 - 1):
    return f'offload: {name}="{value}" is not a whole number from {least} to {most}; give bytes or a count in digits.'


def no_budget(value):
    return (
        'offload: TORCH_OFFLOAD_BUDGET can\'t be read: a budget is a number of bytes, a share like "40%", or "auto"; '
        f'got "{value}".'
    )


LINK = 'offload: TORCH_OFFLOAD_LINK="nonsense" names no link; choose auto, cuda, sim or none.'


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TORCH_OFFLOAD_LINK", "nonsense", LINK),
        ("TORCH_OFFLOAD_LINK", "", "no error"),  # as if it were not set
        (
            "TORCH_OFFLOAD_HOST_JOBS",
            "later",
            'offload: TORCH_OFFLOAD_HOST_JOBS="later" names no time; choose now, soon or wanted.',
        ),
        ("TORCH_OFFLOAD_BUDGET", "half", no_budget("half")),
        ("TORCH_OFFLOAD_BUDGET", "140%", no_budget("140%")),
        *(
            ("TORCH_OFFLOAD_SIM_DEVICES", value, not_whole("TORCH_OFFLOAD_SIM_DEVICES", value, least=1, most=127))
            for value in ("0", "128", "two")
        ),
        ("TORCH_OFFLOAD_SIM_DEVICES", "127", "no error"),
        *(
            (name, value, not_whole(name, value))
            for name, value in (
                ("TORCH_OFFLOAD_RING_BYTES", "lots"),
                ("TORCH_OFFLOAD_RING_BYTES", "-5"),
                ("TORCH_OFFLOAD_RING_BYTES", "1e9"),
                ("TORCH_OFFLOAD_SEED", "x"),
                ("TORCH_OFFLOAD_PINNED_LIMIT", "512MB"),
                ("TORCH_OFFLOAD_SEED", "9" * 23),
            )
        ),
        *(
            ("TORCH_OFFLOAD_COPY_DELAY_US", value, not_whole("TORCH_OFFLOAD_COPY_DELAY_US", value, most=1000000))
            for value in ("1000001", "9" * 23)
        ),
        ("TORCH_OFFLOAD_COPY_DELAY_US", "1000000", "no error"),
    ],
)
@pytest.mark.once
def test_bad_settings(name, value, sentence):
    settings = {"TORCH_OFFLOAD_LINK": "sim", name: value}
    done = python(
        """
        import torch, torch_offload
        for _ in range(2):
            try:
                torch.ones(3, device="offload")
            except RuntimeError as error:
                print(error)
            else:
                print("no error")
        print(torch.ones(3).sum().item())
        """,
        **settings,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [sentence, sentence, "3.0"]


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
    assert done.stdout == (
        "offload: TORCH_OFFLOAD_LINK=cuda asks for a CUDA device, and PyTorch sees none here; choose auto or none.\n"
    )


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
        with pytest.raises(
            RuntimeError, match=r"^(mm: )?mat1 and mat2 shapes cannot be multiplied \(2x63 and 64x64\)$"
        ):
            torch.ones(2, 63, device=COMPUTE) @ weight
    assert (torch.ones(2, 64, device=COMPUTE) @ weight).sum().item() == 2 * 64 * 64


def test_errors_name_the_device_as_the_user_does():
    sentence = "offload: set_ was given a storage on cpu for a tensor on offload:0; both must be on the same device."
    says(RuntimeError, sentence, lambda: torch.ones(2, 2, device=OFFLOAD).set_(torch.ones(2, 2)))


def test_fetch_to_a_device_that_does_not_compute():
    w = torch.ones(3, device=OFFLOAD)
    for target in ("meta", "xpu:0", *([] if GPU else ["cuda:0"])):
        with pytest.raises(RuntimeError, match=f"can't be fetched to {target}"):
            torch.ops.offload.fetch(w, torch.device(target))
    assert_same(torch.ops.offload.fetch(w, torch.device("cpu:0")), torch.ones(3))
    with pytest.raises(RuntimeError, match="stashed on an offload device, and not on cpu"):
        torch.ops.offload.stash(torch.ones(3), CPU)
    assert_same(w, torch.ones(3))


@pytest.mark.parametrize(
    ("resize", "sentence"),
    [
        (lambda t: t.resize_(-1), "Trying to create tensor with negative dimension -1: [-1]"),
        (lambda t: t.resize_(2, -3), "Trying to create tensor with negative dimension -3: [2, -3]"),
        (lambda t: t.resize_(2, 2**62), f"Storage size calculation overflowed with sizes=[2, {2**62}]"),
        (
            lambda t: t.untyped_storage().resize_(-1),
            "offload: a storage of -1 bytes was asked for; give 0 or more.",
        ),
        (
            lambda t: torch.UntypedStorage(-8, device=OFFLOAD),
            "offload: a storage of -8 bytes was asked for; give 0 or more.",
        ),
        (
            lambda t: t.set_(t.untyped_storage(), 0, (2, 2), (1,)),
            "offload: set_ was given 2 sizes and 1 strides; give as many of one as of the other, or no strides.",
        ),
        (
            lambda t: t.set_(t.untyped_storage(), 0, (-2,), (1,)),
            "Trying to create tensor with negative dimension -2: [-2]",
        ),
        (
            lambda t: t.set_(t.untyped_storage(), -1, (2,), (1,)),
            "offload: set_ was given the storage offset -1; it must be 0 or more.",
        ),
        (
            lambda t: t.set_(t.untyped_storage(), 0, (2,), (-1,)),
            "offload: set_ was given the strides [-1]; each must be 0 or more.",
        ),
    ],
)
def test_sizes_that_can_not_be_change_nothing(resize, sentence):
    tensor = torch.arange(4.0, device=OFFLOAD)
    with pytest.raises(RuntimeError) as caught:
        resize(tensor)
    assert str(caught.value).splitlines()[0] == sentence
    assert tensor.untyped_storage().nbytes() == 16
    assert_same(tensor, torch.arange(4.0))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.as_strided((-1,), (1,)),
        lambda t: t.as_strided((2,), (-1,)),
        lambda t: t.as_strided((2,), (1,), -3),
        lambda t: t.as_strided((2, 2), (1,)),
        lambda t: t.as_strided((200, 2), (1, 1)),
        lambda t: t.as_strided_((2,), (1,), -3),
    ],
)
def test_a_view_that_can_not_be(view):
    raises_as_on(CPU, lambda device: view(torch.arange(12.0, device=device)))


def test_a_slice_of_a_storage():
    t = torch.arange(8.0, device=OFFLOAD)
    start = torch.empty(0, device=OFFLOAD).set_(t.untyped_storage()[0:8])
    assert start.tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="begins within the memory of another one; make a tensor over all"):
        torch.empty(0, device=OFFLOAD).set_(t.untyped_storage()[8:16]).tolist()
    assert_same(t, torch.arange(8.0))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pin_memory": 1}, "pin_memory is 1; give True or False."),
        ({"pin_memory": None}, "pin_memory is None; give True or False."),
        ({"use_streams": "no"}, "use_streams is 'no'; give True or False."),
        ({"filter": 3}, "filter is 3; give a function of a tensor, or None."),
        ({"filter": "weight"}, "filter is 'weight'; give a function of a tensor, or None."),
    ],
)
def test_options_of_saved_tensors_that_are_not_of_their_kind(options, sentence):
    says(TypeError, f"offload: {sentence}", lambda: torch_offload.saved_tensors(**options))
    says(TypeError, f"offload: {sentence}", lambda: torch_offload.offload_activations(nn.Linear(2, 2), **options))


@pytest.mark.parametrize(
    ("module", "options", "sentence"),
    [
        ([nn.Linear(2, 2)], {}, "module is of type list; give a torch.nn.Module."),
        (nn.Linear(2, 2), {"region": 3}, "region is of type int; give a saved_tensors(), or None for a new one."),
        (
            nn.Linear(2, 2),
            {"include": 3},
            "include has 3; give names of modules as strings, with wildcards or without.",
        ),
        (
            nn.Linear(2, 2),
            {"exclude": ["", 3]},
            "exclude has 3; give names of modules as strings, with wildcards or without.",
        ),
    ],
)
def test_arguments_of_offload_activations_that_are_not_of_their_kind(module, options, sentence):
    says(TypeError, f"offload: {sentence}", lambda: torch_offload.offload_activations(module, **options))
