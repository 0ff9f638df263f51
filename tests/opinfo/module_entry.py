"""One module of PyTorch's module database against the plain device, in the modes and with the comparisons of entry.py.

``mixed``: the module on offload and its inputs on the plain device, and the other way round. ``forward`` compares parameters
and buffers after the call, too. Training and evaluation both.
"""

import copy
import random
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from entry import (
    Findings,
    NoAnswerError,
    check_gradients,
    compare,
    cotangents,
    fill_new_memory,
    first_line,
    matches,
    same_bits,
    sameness,
)
from helpers import COMPUTE, GPU, OFFLOAD
from operands import carry, tensors_in
from torch.utils import _pytree as pytree
from truth import HostDraws

# Where the module is, and where its inputs are.
PLACES = {
    "mixed": ((OFFLOAD, COMPUTE), (COMPUTE, OFFLOAD)),
    "offload": ((OFFLOAD, OFFLOAD),),
}


class ModuleEntry(Findings):
    """A ModuleInfo, on the plain device and on offload; used as entry.Entry is."""

    def inputs(self, training: bool) -> Iterator[tuple[torch.nn.Module, Any]]:
        torch.manual_seed(0)
        random.seed(0)
        dtype = torch.float32
        made = self.info.module_inputs_func(
            self.info, device=str(COMPUTE), dtype=dtype, requires_grad=True, training=training
        )
        for sample in list(made)[: self.samples]:
            construct, forward = sample.constructor_input, sample.forward_input
            torch.manual_seed(0)
            module = self.info.module_cls(*construct.args, **construct.kwargs).to(COMPUTE, dtype).train(training)
            yield module, (forward.args, forward.kwargs)

    def run(
        self, what: str, module: torch.nn.Module, home: torch.device, inputs: Any, there: torch.device, seed: int
    ) -> dict:
        module = copy.deepcopy(module).to(home)
        backward = what == "backward"
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: carry(x, there, backward), inputs)
        torch.manual_seed(seed)
        random.seed(seed)
        if not backward:
            with torch.no_grad():
                return {"result": module(*args, **kwargs), "state": module.state_dict()}
        result = module(*args, **kwargs)
        leaves = [t for t in (*module.parameters(), *tensors_in((args, kwargs))) if t.requires_grad]
        results = [t for t in tensors_in(result) if t.requires_grad]
        if not leaves or not results:
            raise NoAnswerError
        gradients = torch.autograd.grad(results, leaves, cotangents(results), allow_unused=True)
        check_gradients(leaves, gradients)
        return {"result": result, "gradient": list(gradients)}

    def check(self, what: str, module: torch.nn.Module, inputs: Any) -> None:
        holds = any(True for _ in (*module.parameters(), *module.buffers()))
        todo = [mode for mode in PLACES if (mode, what) not in self.failures and (holds or mode == "offload")]
        answers = []
        try:
            for fill in (0x55, 0xAA):
                fill_new_memory(fill)
                answers.append(self.run(what, module, COMPUTE, inputs, COMPUTE, 0))
        except NoAnswerError:
            return
        except Exception as error:
            self.plain_errors.append(f"{what}: {type(error).__name__}: {error}"[:200])
            return
        expected, again = answers
        for mode in todo:
            if not self.enter(mode, what):
                continue
            self.counts[mode, what] = self.counts.get((mode, what), 0) + 1
            for home, there in PLACES[mode]:
                try:
                    actual = self.run(what, module, home, inputs, there, 0)
                    truth, same = expected, same_bits if matches(again, expected) else None
                    if GPU and not matches(actual, expected, same):
                        plain = partial(self.run, what, module, COMPUTE, inputs, COMPUTE, 0)
                        # A lazy module on offload draws its weights as any other there does.
                        with HostDraws():
                            truth = plain()
                        same = sameness(plain, expected) if same else None
                    compare(actual, truth, same, "")
                except Exception as error:
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    self.failures[mode, what] = f"{reason} [module on {home.type}, inputs on {there.type}]"
                    break

    def look(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for training in (True, False) if self.info.train_and_eval_differ else (True,):
                for module, inputs in self.inputs(training):
                    self.check("forward", module, inputs)
                    self.check("backward", module, inputs)
