"""An import that is refused says why in one sentence, and leaves the process as it was."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from helpers import passes
from torch.utils import cpp_extension

# The package with an extension that looks for other functions than PyTorch's; and what a refused import must not have changed.
PRELUDE = """
import importlib.machinery, importlib.util, os, sys, types
import torch

def extension(**symbols):
    [folder] = importlib.util.find_spec("torch_offload").submodule_search_locations
    finder = importlib.machinery.FileFinder(folder, (importlib.machinery.ExtensionFileLoader,
                                                     importlib.machinery.EXTENSION_SUFFIXES))
    spec = finder.find_spec("_C")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    wrapped = types.ModuleType("torch_offload._C")
    wrapped.__dict__.update(vars(loaded))
    wrapped.register_device = lambda: loaded.register_device(**symbols)
    sys.modules["torch_offload._C"] = wrapped
    return lambda: setattr(wrapped, "register_device", loaded.register_device)

repair = lambda: None

def attempt(function):
    try:
        return str(function())
    except Exception as error:
        return str(error).splitlines()[0]

def square(device):
    x = torch.ones(3, requires_grad=True, device=device)
    (x * x).sum().backward()
    return x.grad.tolist()

def observed():
    dispatched = torch._C._dispatch_get_registrations_for_dispatch_key
    name = torch._C._get_privateuse1_backend_name()
    return (
        name, torch.device(name, 0), hasattr(torch, "offload"), hasattr(torch.Tensor, "is_offload"), square("cpu"),
        attempt(lambda: torch.cuda.is_available() and square("cuda")),  # fails beside any other backend in some versions
        attempt(torch._C._get_accelerator), attempt(torch._C._accelerator_getDeviceIndex),
        attempt(torch.accelerator.device_count),
        attempt(lambda: torch.empty(1, device=name)), attempt(lambda: torch.accelerator.set_device_index(0)),
        sorted(dispatched("PrivateUse1")), sorted(dispatched("AutogradPrivateUse1")), sorted(dispatched("Conjugate")),
    )

def refused():
    before = observed()
    try:
        import torch_offload
    except ImportError as error:
        print(error)
    assert observed() == before, (observed(), before)
"""

THEN_IT_WORKS = """
repair()
os.environ.pop("TORCH_OFFLOAD_ACCELERATOR", None)
import torch_offload
layer = torch.nn.Linear(4, 2).to("offload")
layer(torch.ones(3, 4, device="cuda" if torch.cuda.is_available() else "cpu")).sum().backward()
print(layer.weight.grad.tolist())
"""

WRONG_TORCH = (
    f" in torch {torch.__version__.partition('+')[0]}, so registering the offload device would break every CUDA backward in "
    "this process; use a torch version that this release of torch_offload supports, or set TORCH_OFFLOAD_ACCELERATOR=keep to "
    "import it all the same and go without CUDA autograd, CUDA graphs and pinned memory."
)

DEVICE_INDEX = (
    "_ZN2at11accelerator14getDeviceIndexEv"  # a function that PyTorch's libraries call, and backward doesn't ask
)


@pytest.mark.parametrize(
    ("arrange", "sentence"),
    [
        (
            "repair = extension(get='nowhere')",
            "torch_offload: no call of at::accelerator::getAccelerator could be found" + WRONG_TORCH,
        ),
        (
            "repair = extension(is_one='nowhere')",
            "torch_offload: no call of at::accelerator::isAccelerator could be found" + WRONG_TORCH,
        ),
        (
            f"repair = extension(get='{DEVICE_INDEX}')",
            "torch_offload: the offload device would still be taken for the current accelerator" + WRONG_TORCH,
        ),
        (
            f"repair = extension(is_one='{DEVICE_INDEX}')",
            "torch_offload: autograd would still take the offload device for an accelerator" + WRONG_TORCH,
        ),
        (
            "os.environ['TORCH_OFFLOAD_ACCELERATOR'] = 'drop'",
            'torch_offload: TORCH_OFFLOAD_ACCELERATOR=drop is unknown; leave it unset, or set it to "keep".',
        ),
    ],
    ids=["no get", "no is", "get elsewhere", "is elsewhere", "setting"],
)
def test_a_refusal_changes_nothing(arrange, sentence):
    assert passes(PRELUDE + arrange + "\nrefused()\n" + THEN_IT_WORKS).splitlines() == [sentence, str([[3.0] * 4] * 2)]


def another(sign):
    return (
        f"torch_offload: another PrivateUse1 backend is loaded in this process ({sign}), and PyTorch has room for one; import "
        "only one of the two."
    )


KERNEL = 'library = torch.library.Library("aten", "IMPL"); library.impl("sin", lambda x: x, "PrivateUse1")'


@pytest.mark.parametrize(
    ("arrange", "sign"),
    [
        ('torch.utils.rename_privateuse1_backend("other")', 'its name is "other"'),
        (KERNEL, "it has registered a kernel for aten::sin"),
        (KERNEL.replace("PrivateUse1", "AutogradPrivateUse1"), "it has registered a kernel for aten::sin"),
        (
            'library = torch.library.Library("_", "IMPL"); library.fallback(lambda op, *a: None, "PrivateUse1")',
            "it has registered a fallback for PrivateUse1",
        ),
    ],
)
def test_another_backend(arrange, sign):
    assert passes(PRELUDE + arrange + "\nrefused()").splitlines() == [another(sign)]


OTHER = """
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

extern "C" void registerGuard() {
  c10::impl::registerDeviceGuard(
      c10::DeviceType::PrivateUse1, new c10::impl::FakeGuardImpl<c10::DeviceType::PrivateUse1>());
}
extern "C" void registerHooks() {
  at::RegisterPrivateUse1HooksInterface(new at::PrivateUse1HooksInterface());
}
extern "C" bool guardIsOurs() {
  return dynamic_cast<const c10::impl::FakeGuardImpl<c10::DeviceType::PrivateUse1>*>(
      c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1));
}
"""


@pytest.fixture(scope="module")
def other_library(tmp_path_factory):
    """Another backend's library, as its own import would load it."""
    compiler = shutil.which("c++") or pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("other")
    (folder / "other.cpp").write_text(OTHER)
    library = folder / "other.so"
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]
    built = subprocess.run(
        [
            compiler,
            "-std=c++20",
            "-shared",
            "-fPIC",
            *includes,
            str(folder / "other.cpp"),
            "-o",
            str(library),
            *libraries,
        ],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return Path(library)


@pytest.mark.parametrize(
    ("call", "sign"),
    [("registerGuard", "it has registered a device guard"), ("registerHooks", "it has registered hooks")],
)
def test_another_backends_library(other_library, call, sign):
    program = f"import ctypes; other = ctypes.CDLL({str(other_library)!r}); other.{call}()\nrefused()\n"
    if call == "registerGuard":
        program += "assert other.guardIsOurs()\n"
    assert passes(PRELUDE + program).splitlines() == [another(sign)]


def test_another_backend_can_be_loaded_after_a_refusal(other_library):
    program = f"""
os.environ["TORCH_OFFLOAD_ACCELERATOR"] = "drop"
refused()
import ctypes
other = ctypes.CDLL({str(other_library)!r})
other.registerGuard()
other.registerHooks()
torch.utils.rename_privateuse1_backend("other")
print(torch.device("other:0"), torch.accelerator.current_accelerator(), other.guardIsOurs() != 0)
refused()
"""
    lines = passes(PRELUDE + program).splitlines()
    assert lines[1:] == ["other:0 other True", another('its name is "other"')]


def test_a_second_module_of_that_name():
    program = "torch.offload = 3\ntry:\n    import torch_offload\nexcept ImportError as error:\n    print(error)"
    [line] = passes("import torch\n" + program).splitlines()
    assert line == (
        "torch_offload: torch.offload exists already (3), and the device's module needs that name; import torch_offload once, "
        "and before what sets it."
    )


@pytest.mark.parametrize("link", ["sim", "none"])
def test_as_the_accelerator(link):
    """With TORCH_OFFLOAD_ACCELERATOR=keep PyTorch takes offload for its accelerator; without a GPU all works the same."""
    program = """
    import torch, torch_offload
    from torch import nn

    def run(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.ones(3, 4, requires_grad=True, device=device)
        for activations in (torch.ones(3, 4), x):
            optimizer.zero_grad()
            model(activations).sum().backward()
            optimizer.step()
        w = torch.ones(3, requires_grad=True, device=device)
        [first] = torch.autograd.grad((w * w * w).sum(), w, create_graph=True)
        first.sum().backward()
        return [t.cpu() for t in (*model.parameters(), x.grad, w.grad)]

    print(torch.accelerator.current_accelerator(), torch.accelerator.device_count())
    print(all(torch.equal(a, b) for a, b in zip(run("cpu"), run("offload"), strict=True)))
    w = torch.ones(3, requires_grad=True, device="offload")
    (w * w).sum().backward()  # at exit nothing is left over
    """
    said = passes(program, TORCH_OFFLOAD_LINK=link, TORCH_OFFLOAD_ACCELERATOR="keep", CUDA_VISIBLE_DEVICES="")
    assert said.split() == ["offload", "1", "True"]
