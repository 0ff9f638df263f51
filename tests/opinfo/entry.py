"""One entry of PyTorch's op database against the plain device, in both modes.

``mixed``: each tensor operand on offload in turn, and all but one. ``offload``: all of them. What is compared, bit by bit:

* ``forward``: results, operands after the call, and where results live
* ``backward``: results and every operand's gradient, which must live where the operand does
* ``inplace``: the operand, which is what is returned, its version, and gradients through the write
* ``out``: ``out=`` of the right size and of none
* ``view``: results share memory with the operand that they share it with on the plain device, at the same strides
* ``noncontiguous``: forward and backward of operands with gaps between their elements
"""

import ctypes
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from helpers import COMPUTE, CPU, GPU, OFFLOAD, bits
from operands import Call, mixtures, result_device, same_storage, tensors_in
from torch.utils import _pytree as pytree
from truth import Draws, HostDraws, may_vary, varies

MODES = ("mixed", "offload")
WHATS = ("forward", "backward", "inplace", "out", "view", "noncontiguous")

# Their values are whatever the memory held.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)

# Beside the first of these, where a few samples are asked for, and how many of each. Complex numbers find what takes conjugates
# for its values, others what converts, or has no kernel for them on one of the devices. Whole runs, and with them the published
# tables, are of one dtype.
OTHERS = {torch.complex64: 2, torch.bfloat16: 1, torch.int64: 1}

# Of two bytes an element PyTorch chooses how they sum by the name of the operand's device, in Python.
SUM_BY_NAME = {"nn.functional.linear_cross_entropy"}


try:
    mallopt = ctypes.CDLL(None).mallopt
except (AttributeError, OSError):
    mallopt = None


def fill_new_memory(value: int) -> None:
    """Lets the C library give out memory filled with a byte, where it can: what nobody wrote is then another each time."""
    if mallopt is not None:
        mallopt(-6, value)  # M_PERTURB


class DifferenceError(Exception):
    """Offload gives something else."""


class NoAnswerError(Exception):
    """The plain device has no answer."""


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if torch.equal(bits(actual), bits(expected)):
        return True
    if not (expected.is_floating_point() or expected.is_complex()):
        return False
    # Any NaN is as good as another.
    a, e = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (actual.cpu(), expected.cpu()))
    nan = e.isnan()
    return torch.equal(a.isnan(), nan) and torch.equal(bits(a[~nan]), bits(e[~nan]))


def nearly(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same but for the order of a sum."""
    return torch.allclose(actual.to(expected.device), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


Same = Callable[[torch.Tensor, torch.Tensor], bool]


def compare(actual: Any, expected: Any, values: Same | None, where: str) -> None:
    """Raises DifferenceError. ``values`` says which are the same; without it only kinds and shapes are looked at."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            raise DifferenceError(f"{where}: {type(actual).__name__} and not a tensor")
        for aspect in ("dtype", "shape", "layout", "requires_grad"):
            a, e = getattr(actual, aspect), getattr(expected, aspect)
            if a != e:
                raise DifferenceError(f"{where}: {aspect} {a} and not {e}")
        if expected.layout != torch.strided:
            compare(actual.detach().to_dense(), expected.detach().to_dense(), values, where)
        elif values and not values(actual.detach(), expected.detach()):
            raise DifferenceError(f"{where}: other values")
    elif isinstance(expected, dict):
        for key, value in expected.items():
            if key != "writes":
                compare(actual[key], value, values, f"{where} {key}".strip())
            elif any(a == 0 and e > 0 for a, e in zip(actual[key], value, strict=True)):
                raise DifferenceError("a write that the version does not count")
    elif isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            raise DifferenceError(f"{where}: {len(actual)} results and not {len(expected)}")
        for a, e in zip(actual, expected, strict=True):
            compare(a, e, values, where)
    elif values and actual != expected and not (actual != actual and expected != expected):
        raise DifferenceError(f"{where}: {actual} and not {expected}")


def cotangents(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Normal values beside the results, whichever device these are on."""
    made = []
    for k, result in enumerate(results):
        generator = torch.Generator().manual_seed(k)
        values = torch.randn(result.shape, dtype=result.dtype, generator=generator)
        if result.layout != torch.strided:
            values = values.to_sparse(layout=result.layout)
        made.append(values.to(result.device))
    return made


def gradients(outputs: Any, call: Call) -> list[torch.Tensor | None]:
    results = [t for t in tensors_in(outputs) if t.requires_grad]
    leaves = [t for t in call.operands() if t.requires_grad]
    if not results or not leaves:
        raise NoAnswerError
    return list(torch.autograd.grad(results, leaves, cotangents(results), allow_unused=True))


def check_gradients(leaves: list[torch.Tensor], found: list[torch.Tensor | None]) -> None:
    """Each lives where its operand does."""
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None and gradient.device.type != leaf.device.type:
            raise DifferenceError(f"gradient on {gradient.device} of an operand on {leaf.device}")


class Findings:
    """What an entry of a database is looked at for, and what was found.

    Args:
        info: the entry.
        samples: how many samples of the smallest, or None for all.
        enter: told (mode, what) before it is looked at; False skips it.
    """

    def __init__(self, info: Any, samples: int | None, enter: Callable[[str, str], bool]) -> None:
        self.info = info
        self.samples = samples
        self.enter = enter
        self.counts: dict[tuple[str, str], int] = {}
        self.failures: dict[tuple[str, str], str] = {}
        self.plain_errors: list[str] = []


class Entry(Findings):
    """An OpInfo, on the plain device and on offload."""

    # -- what is run

    def forward(self, call: Call, sample: Any) -> dict:
        input, args, kwargs = call.arguments()
        return {"result": self.info(input, *args, **kwargs), "operand": call.operands()}

    def backward(self, call: Call, sample: Any) -> dict:
        input, args, kwargs = call.arguments()
        result = self.info(input, *args, **kwargs)
        return {"result": result, "gradient": gradients(sample.output_process_fn_grad(result), call)}

    def inplace(self, call: Call, sample: Any) -> dict:
        input, args, kwargs = call.arguments()
        target = pytree.tree_map_only(torch.Tensor, torch.clone, input)
        targets = tensors_in(target)
        versions = [t._version for t in targets]
        result = self.info.inplace_variant(target, *args, **kwargs)
        observed = {
            "result": result,
            "target": target,
            "itself": result is target,
            "writes": [t._version - version for t, version in zip(targets, versions, strict=True)],
        }
        if any(t.requires_grad for t in targets):
            observed["gradient"] = gradients(sample.output_process_fn_grad(target), call)
        return observed

    def out(self, call: Call, sample: Any) -> dict:
        input, args, kwargs = call.arguments()
        given = kwargs.pop("out")
        returned = self.info(input, *args, **kwargs, out=given)
        itself = [a is b for a, b in zip(tensors_in(returned), tensors_in(given), strict=False)]
        return {"out": given, "itself": itself, "writes": [t._version for t in tensors_in(given)]}

    # -- against the plain device

    def run(self, what: str, call: Call, sample: Any) -> dict:
        action = {"view": self.forward, "noncontiguous": self.backward}.get(what, getattr(self, what, None))
        if what == "noncontiguous" and not any(t.requires_grad for t in call.operands()):
            action = self.forward
        torch.manual_seed(0)
        random.seed(0)
        return action(call, sample)

    def truth(self, what: str, call: Call, sample: Any, gradient: bool) -> tuple[dict, bool, bool]:
        """What the plain device says, whether it says so twice, and whether it draws random numbers."""
        answers = []
        draws = Draws()
        try:
            for fill, mode in ((0x55, nullcontext()), (0xAA, nullcontext()), (0x55, draws)):
                fill_new_memory(fill)
                with mode:
                    answers.append(self.run(what, call.to((), gradient), sample))
        except NoAnswerError:
            raise
        except Exception as error:
            self.plain_errors.append(f"{what}: {type(error).__name__}: {error}"[:200])
            raise NoAnswerError from error
        expected, again, _ = answers
        return expected, self.info.name not in UNDEFINED and matches(again, expected), draws.seen

    def check(self, what: str, call: Call, sample: Any, gradient: bool) -> None:
        mixed = [] if what == "out" and call.names_device() else mixtures(len(call.movable))
        places = {"mixed": mixed, "offload": [frozenset(range(len(call.movable)))]}
        if len(call.movable) < len(call.tensors) or not (call.tensors or call.names_device()):
            places["offload"] = []
        todo = [mode for mode in MODES if places[mode] and (mode, what) not in self.failures]
        if not todo:
            return
        try:
            expected, stable, random_values = self.truth(what, call, sample, gradient)
        except NoAnswerError:
            return
        if what == "view" and not self.views(call.to((), False), sample):
            return
        for mode in todo:
            if not self.enter(mode, what):
                continue
            self.counts[mode, what] = self.counts.get((mode, what), 0) + 1
            for place in places[mode]:
                there = call.to([call.movable[k] for k in place], gradient, mode == "offload")
                try:
                    actual = self.run(what, there, sample)
                    same = matches(actual, expected, same_bits if stable else None)
                    if GPU and not same:
                        same = self.is_another_truth(what, call, sample, gradient, actual, there, random_values)
                    if not same:
                        again = partial(self.run, what, call.to((), gradient), sample)
                        compare(actual, expected, sameness(again, expected) if stable else None, "")
                    self.check_devices(what, mode, there, actual, expected)
                    if what == "view":
                        self.check_views(there, actual, expected, call, sample)
                except Exception as error:
                    operands = f"on offload: {sorted(place)} of {len(call.movable)}"
                    self.failures[mode, what] = f"{type(error).__name__}: {first_line(error)} [{operands}]"
                    break

    def is_another_truth(
        self, what: str, call: Call, sample: Any, gradient: bool, actual: dict, there: Call, random_values: bool
    ) -> bool:
        """Whether it is what the host gives, or the device from what the host has drawn."""
        if result_device(there.operands()) != OFFLOAD:
            return False
        # Without operands it is made on the host, and what is written is written where it was born.
        if random_values or not call.operands() or what in ("inplace", "out"):
            host = self.run(what, call.to((), gradient, plain=CPU), sample)
            if matches(actual, host):
                return True
        if not random_values:
            return False
        with HostDraws():
            drawn = self.run(what, call.to((), gradient), sample)
        return matches(actual, drawn)

    def check_devices(self, what: str, mode: str, call: Call, actual: dict, expected: dict) -> None:
        if "gradient" in actual:
            check_gradients([t for t in call.operands() if t.requires_grad], actual["gradient"])
        if "itself" in actual:
            return
        # What is written in Python is several operations, and each part of the result may be of other operands.
        if mode == "mixed" and (call.names_device() or isinstance(self.info.op, FunctionType)):
            return
        wanted = OFFLOAD if mode == "offload" else result_device(call.operands())
        for result, plain in zip(tensors_in(actual["result"]), tensors_in(expected["result"]), strict=True):
            if plain.device != COMPUTE and result.device == plain.device:
                continue  # the state of a generator, say, stays on the CPU
            if any(result is operand or same_storage(result, operand) for operand in call.operands()):
                continue
            if result.layout == torch.strided and result.device.type != wanted.type:
                raise DifferenceError(f"result on {result.device} and not on {wanted}")

    # -- views

    def views(self, call: Call, sample: Any) -> list[tuple[int, int]]:
        """Which results share memory with which operands."""
        results = tensors_in(self.forward(call, sample)["result"])
        pairs = itertools.product(enumerate(results), enumerate(call.operands()))
        return [(r, o) for (r, result), (o, operand) in pairs if same_storage(result, operand)]

    def check_views(self, call: Call, actual: dict, expected: dict, plain: Call, sample: Any) -> None:
        results = tensors_in(actual["result"])
        operands = call.operands()
        for r, o in self.views(plain.to((), False), sample):
            # Where an operand has moved, what was computed from it is no view.
            if results[r].device == operands[o].device and not same_storage(results[r], operands[o]):
                raise DifferenceError("result is no view of the operand")
        for result, truth in zip(results, tensors_in(expected["result"]), strict=True):
            if result.stride() != truth.stride() or result.storage_offset() != truth.storage_offset():
                raise DifferenceError(f"view of strides {result.stride()} and not {truth.stride()}")

    # -- all of it

    def sample_inputs(self, dtype: torch.dtype, gradient: bool, most: int | None) -> Iterator[Any]:
        torch.manual_seed(0)
        random.seed(0)
        samples = self.info.sample_inputs(str(COMPUTE), dtype, requires_grad=gradient)
        if most is None:
            return iter(samples)
        first = list(itertools.islice(samples, 4 * most))
        # Calls with more operands first: these can be mixed.
        first.sort(key=lambda sample: (-min(2, len(Call.of(sample).tensors)), Call.of(sample).size()))
        return iter(first[:most])

    def dtypes(self) -> dict[torch.dtype, int | None]:
        """Each that is looked at, with how many samples."""
        supported = self.info.supported_dtypes(COMPUTE.type)
        first = next((dtype for dtype in (*DTYPES, *supported) if dtype in supported), None)
        looked = {} if first is None else {first: self.samples}
        if first == torch.float32 and self.samples is not None:
            # What the CPU lacks is the host's by contract.
            others = supported & self.info.supported_dtypes(CPU.type)
            others -= {torch.bfloat16} if self.info.name in SUM_BY_NAME else set()
            looked |= {dtype: min(most, self.samples) for dtype, most in OTHERS.items() if dtype in others}
        return looked

    def look(self) -> None:
        for dtype, most in self.dtypes().items():
            self.look_at(dtype, most)

    def look_at(self, dtype: torch.dtype, most: int | None) -> None:
        differentiable = self.info.supports_autograd and dtype in self.info.supported_backward_dtypes(COMPUTE.type)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in self.sample_inputs(dtype, differentiable, most):
                call = Call.of(sample)
                self.check("forward", call, sample, False)
                self.check("view", call, sample, False)
                if differentiable:
                    self.check("backward", call, sample, True)
                if self.info.inplace_variant is not None and not sample.broadcasts_input:
                    self.check("inplace", call, sample, differentiable and self.info.supports_inplace_autograd)
                # The host, whose affair it is, may want out= tensors of another type than a GPU gives of bfloat16.
                takes_out = self.info.supports_out and not (GPU and dtype == torch.bfloat16)
                if takes_out and not self.info.name.startswith("_foreach"):
                    self.check_out(call, sample)
                try:
                    spread = sample.noncontiguous()
                except Exception:
                    continue  # of a kind of tensor that can't have gaps
                self.check("noncontiguous", Call.of(spread), spread, differentiable)

    def check_out(self, call: Call, sample: Any) -> None:
        try:
            results = self.run("forward", call.to((), False), sample)["result"]
        except Exception:
            return
        tensors = tensors_in(results)
        if not tensors or any(t.layout != torch.strided for t in tensors):
            return
        for fill in (lambda t: torch.full_like(t, 1).detach(), lambda t: t.new_empty(0)):
            out = fill(results) if isinstance(results, torch.Tensor) else tuple(fill(t) for t in tensors)
            input, args, kwargs = call.arguments()
            changed = type(sample)(input, args=args, kwargs={**kwargs, "out": out})
            self.check("out", Call.of(changed), sample, False)


def matches(actual: dict, expected: dict, values: Same | None = same_bits) -> bool:
    try:
        compare(actual, expected, values, "")
    except DifferenceError:
        return False
    return True


def sameness(again: Callable[[], dict], expected: dict) -> Same | None:
    """How much of ``expected`` the plain device gives each time that ``again`` asks it."""
    if not GPU:
        return same_bits
    if varies(again, partial(matches, expected=expected)):
        return None
    return nearly if may_vary(again) else same_bits


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
