"""A process that looks at entries of PyTorch's databases, one after the other; it may crash or hang and is then replaced.

Takes a line of JSON for each entry: {"name", "samples", "skip": [[mode, what], ...]}. Answers with lines {"at": [mode, what]}
while it works and {"done": {...}} at the end.
"""

import itertools
import json
import os
import sys
import time
from functools import partial
from typing import Any

import torch
from entry import Entry
from helpers import GPU
from module_entry import ModuleEntry


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def main() -> None:
    # What operations print must not come between.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if GPU:
        # Before the import, which locks them.
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True, warn_only=True)
    from torch.testing._internal import common_methods_invocations as databases
    from torch.testing._internal.common_modules import module_db

    foreach = [
        getattr(databases, f"foreach_{kind}_op_db") for kind in ("unary", "binary", "pointwise", "reduce", "other")
    ]
    entries = {name_of(op): partial(Entry, op) for op in itertools.chain(databases.op_db, *foreach)}
    entries |= {f"module {info.name}": partial(ModuleEntry, info) for info in module_db}

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")

    say(names=list(entries))
    for line in sys.stdin:
        asked = json.loads(line)
        skip = {tuple(pair) for pair in asked["skip"]}
        last = None

        def enter(mode: str, what: str, skip: set = skip) -> bool:
            nonlocal last
            if (mode, what) in skip:
                return False
            if last != (mode, what):
                last = (mode, what)
                say(at=last)
            return True

        entry = entries[asked["name"]](asked["samples"], enter)
        start = time.perf_counter()
        error = None
        try:
            entry.look()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        if GPU:
            torch.cuda.synchronize()  # ends a process whose context is broken
        say(
            done={
                "samples": {f"{mode} {what}": count for (mode, what), count in entry.counts.items()},
                "failures": {f"{mode} {what}": reason for (mode, what), reason in entry.failures.items()},
                "plain_errors": sorted(set(entry.plain_errors))[:3],
                "error": error,
                "seconds": round(time.perf_counter() - start, 2),
            }
        )


if __name__ == "__main__":
    main()
