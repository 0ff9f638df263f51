"""Where tensors that autograd saves for backward are kept."""

import threading
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torch_offload import _C
from torch_offload._arguments import number_of_bytes, true_or_false
from torch_offload._scopes import Decorator


class SavedTensorsPlan(NamedTuple):
    """What a :class:`saved_tensors` with ``share="auto"`` has chosen, and the step that it was last learned from."""

    share: float
    """How much of the bytes that might travel does, from 0 to 1."""
    demanded_share: float
    """The least share that must travel so that no more than ``max_gpu_bytes`` stay; 0 without such a limit, or where the last
    step has kept to it."""
    bytes: int
    """What might have travelled in that step."""
    sent_bytes: int
    """What did."""
    forward_seconds: float
    """From the first tensor that was saved to the first that backward asked for, on the GPU."""
    forward_waited_seconds: float
    """How long the GPU waited in that time for room for copies of saved tensors."""
    backward_seconds: float
    """From there to the last tensor that backward asked for."""
    backward_waited_seconds: float
    """How long the GPU waited in that time for saved tensors."""

    def __str__(self) -> str:
        demanded = f", {self.demanded_share:.0%} at least" if self.demanded_share > 0 else ""
        return (
            f"{self.share:.0%} of what is saved travels{demanded}; "
            f"last, {self.sent_bytes / 1e9:.3f} of {self.bytes / 1e9:.3f} GB did, "
            f"for which forward waited {self.forward_waited_seconds * 1e3:.1f} of {self.forward_seconds * 1e3:.1f} ms "
            f"and backward {self.backward_waited_seconds * 1e3:.1f} of {self.backward_seconds * 1e3:.1f} ms"
        )


class saved_tensors(saved_tensors_hooks, Decorator):  # noqa: N801 - named as torch.no_grad is
    """Within it, what autograd saves for backward goes to host memory, and comes back when backward asks for it.

    A saved tensor travels once the rest of the program has let go of its storage, so parameters and what you keep yourself stay
    where they are, and storages that several operations save travel once. Copies overlap with what the GPU computes, in both
    directions; no result changes. Offload weights that operations save are fetched again in backward, as without this. Tensors
    on the CPU, tensor subclasses and sparse tensors are saved as they are. Of checkpointed functions the inputs are saved so,
    and nothing of what is recomputed, where this is around the call of ``checkpoint()`` and not inside of it.

    May be nested (the innermost decides), entered by several threads, entered again, and used as a decorator: a generator is
    within it while it runs, and async functions are refused. Limits of bytes, and what ``share="auto"`` learns, are each
    region's own; so make one for all layers, if you use them.

    Args:
        min_bytes: Storages of fewer bytes stay on the GPU. Default: 1 MiB, for which a copy takes about 20 us.
        keep_bytes: How many bytes of what was saved last stay on the GPU, where backward asks for them first. Default: 0.
        share: How much of the bytes that might travel does, from 0 to 1, spread evenly over each step; or ``"auto"``: as much
            as the link can carry while the GPU computes. Then everything travels in the first steps, until one of them, the
            second at the earliest, is over and tells by how long the GPU waited how much may in those that follow;
            :attr:`plan` says what was chosen. Default: 1; if ``max_gpu_bytes`` is given, 0: then no more
            travels than that demands.
        max_gpu_bytes: How many bytes of what might travel may stay on the GPU at once, those of ``keep_bytes`` among them.
            What is beyond travels, spread evenly over each step by how much the last one has saved; what a step saves beyond
            that travels as it comes. Not counted are what is under way, what others hold, and what ``max_host_bytes`` has no
            room for; counted together are all GPUs that the region is used on. Default: no limit.
        max_host_bytes: How much host memory may be held for this at once, in bytes; what is saved beyond stays on the GPU, and
            a warning says so once. Default: no limit but the machine's.
        in_flight_bytes: How many bytes on their way may take GPU memory, in each direction: the GPU waits for the copies of
            what is beyond, and one storage at least is fetched ahead. Default: what the ring has room for
            (:func:`torch.offload.set_ring_bytes`), which bounds this too.
        pin_memory: Whether that host memory is page-locked. Copies of memory that isn't go through a ring of memory that is,
            and keep a core of the host busy. Default: True.
        use_streams: Whether copies overlap with what the GPU computes, and those to the GPU are made ahead. Where not, each
            operation waits for its own, and no GPU memory is held for copies under way. Default: True.
        filter: Called with each tensor that might travel, parameters too, which won't; where it returns False, that tensor is
            saved as it is. It should ask for ``tensor.nbytes`` and not for ``untyped_storage()``, which holds the storage.

    Raises:
        TypeError: if an argument is not of its kind; numbers of bytes are whole, and True is no number.
        ValueError: if a number of bytes is negative, or 2**63 or more, ``share`` is neither from 0 to 1 nor ``"auto"``, or
            ``keep_bytes`` is more than ``max_gpu_bytes``.

    Source: docs/design/saved-tensors.md.
    """

    def __init__(
        self,
        *,
        min_bytes: int = 1 << 20,
        keep_bytes: int = 0,
        share: float | Literal["auto"] | None = None,
        max_gpu_bytes: int | None = None,
        max_host_bytes: int | None = None,
        in_flight_bytes: int | None = None,
        pin_memory: bool = True,
        use_streams: bool = True,
        filter: Callable[[Tensor], bool] | None = None,
    ) -> None:
        limits = {"max_gpu_bytes": max_gpu_bytes, "max_host_bytes": max_host_bytes, "in_flight_bytes": in_flight_bytes}
        given = {"min_bytes": min_bytes, "keep_bytes": keep_bytes}
        given |= {name: limit for name, limit in limits.items() if limit is not None}
        numbers = dict.fromkeys(limits) | {name: number_of_bytes(name, value) for name, value in given.items()}
        if share is None:
            share = 1.0 if max_gpu_bytes is None else 0.0
        automatic = isinstance(share, str) and share == "auto"
        if not automatic and not (_is_number(share) and 0 <= share <= 1):
            error = ValueError if isinstance(share, str) or _is_number(share) else TypeError
            raise error(f'offload: share is {share!r}; give a number from 0 to 1, or "auto".')
        if max_gpu_bytes is not None and keep_bytes > max_gpu_bytes:
            raise ValueError(
                f"offload: keep_bytes is {keep_bytes}, and max_gpu_bytes, which they are among, is {max_gpu_bytes}; "
                "keep no more."
            )
        if filter is not None and not callable(filter):
            raise TypeError(f"offload: filter is {filter!r}; give a function of a tensor, or None.")
        self._region = region = _C.SavedTensors(
            **numbers,
            share=None if automatic else float(share),
            pin_memory=true_or_false("pin_memory", pin_memory),
            use_streams=true_or_false("use_streams", use_streams),
        )
        super().__init__(region.pack if filter is None else _filtered(region, filter), region.unpack)

    def __exit__(self, kind: type[BaseException] | None = None, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is None:
            self._region.left()

    @property
    def plan(self) -> SavedTensorsPlan | None:
        """What was chosen with ``share="auto"``; None else, and before a step has been learned from, which is over on the
        GPU and has been followed by another one's beginning."""
        plan = self._region.plan()
        return None if plan is None else SavedTensorsPlan(**plan)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _filtered(region: _C.SavedTensors, wanted: Callable[[Tensor], bool]) -> Callable[[Tensor], Any]:
    def pack(tensor: Tensor) -> Any:
        return region.pack(tensor, home=not region.may_go_home(tensor) or bool(wanted(tensor)))

    return pack


class keep_saved_tensors(saved_tensors_hooks, Decorator):  # noqa: N801
    """Within it, what autograd saves stays on the GPU, as it does without :class:`saved_tensors` around it.

    May be used as a decorator, as that may.

    Source: docs/design/saved-tensors.md.
    """

    def __init__(self) -> None:
        region = _C.SavedTensors.keeping()
        super().__init__(region.pack, region.unpack)


def offload_activations(
    module: nn.Module,
    *,
    include: str | Iterable[str] = "*",
    exclude: str | Iterable[str] = (),
    region: saved_tensors | None = None,
    **options: Any,
) -> nn.Module:
    """Runs the forward of modules within :class:`saved_tensors`, and of others within :class:`keep_saved_tensors`.

    Args:
        module: What to look for them in; itself is named ``""``.
        include: Patterns for the names of :meth:`torch.nn.Module.named_modules`, with wildcards (``"layers.*"``); what a module
            contains belongs to it, and of one that has no forward (``ModuleList``) each by itself. Default: all.
        exclude: Patterns for the modules to leave out, with all that they contain (``"lm_head"``).
        region: The one that all modules enter. Default: a new one.
        options: Those of the new one, which are :class:`saved_tensors`'s.

    Returns:
        The module itself. What this adds are hooks of its forward, which can't be pickled; a state_dict has none of them.

    Raises:
        TypeError: if an argument is not of its kind.
        ValueError: if a pattern matches no module, or there are options for a region that is given.

    Source: docs/design/saved-tensors.md.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"offload: module is of type {type(module).__name__}; give a torch.nn.Module.")
    if region is None:
        region = saved_tensors(**options)
    elif not isinstance(region, saved_tensors):
        raise TypeError(
            f"offload: region is of type {type(region).__name__}; give a saved_tensors(), or None for a new one."
        )
    elif options:
        raise ValueError(f"offload: a region is given, and {', '.join(options)} for a new one; give one of them.")
    names = [name for name, _ in module.named_modules()]
    left_out = _outermost(_matching(module, names, _patterns("exclude", exclude)), [])
    chosen = _outermost(_matching(module, names, _patterns("include", include)), left_out)
    for context, found in ((region, chosen), (keep_saved_tensors(), left_out)):
        for name in found:
            for called in _called(module.get_submodule(name)):
                _run_within(context, called)
    return module


def _patterns(name: str, given: str | Iterable[str]) -> list[str]:
    patterns = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"offload: {name} has {pattern!r}; give names of modules as strings, with wildcards or without."
            )
    return patterns


def _matching(module: nn.Module, names: list[str], patterns: list[str]) -> list[str]:
    found = []
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f'offload: no module of {type(module).__name__} is named "{pattern}"; see named_modules().'
            )
        found += matching
    return found


def _outermost(names: Iterable[str], left_out: list[str]) -> list[str]:
    found: list[str] = []
    for name in sorted(set(names), key=len):
        if not any(outer in ("", name) or name.startswith(f"{outer}.") for outer in (*found, *left_out)):
            found.append(name)
    return found


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or the outermost ones with a forward of those that it contains where it has none, and is never called."""
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield module
        return
    for child in module.children():
        yield from _called(child)


def _run_within(context: saved_tensors_hooks, module: nn.Module) -> None:
    entered = threading.local()

    def enter(*_: Any) -> None:
        context.__enter__()
        entered.count = getattr(entered, "count", 0) + 1

    def leave(*_: Any) -> None:
        if getattr(entered, "count", 0) > 0:  # another hook may have failed before ours was called
            entered.count -= 1
            context.__exit__()

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave, always_call=True)
