"""The order of a graph's steps: a fetch comes where it is first needed, and what is sent home goes as soon as it can.

Inductor orders for the least memory on the device, and is free where two orders take as much at most. A weight's gradient takes
more than what it is computed of wherever there are few tokens, so all gradients of a backward may come last, and their copies
up the link after all copies down it. But what is given away at once takes no more early than late. And a fetch takes memory
from where it stands: the copies behind it go ahead by what they have learnt, and not by the place of the call.
"""

from collections.abc import Callable
from typing import Any

import torch

_HOME = {torch.ops.offload.give.coded, torch.ops.offload.stash.coded}


def _sends_home(node: Any) -> bool:
    """Of a node of the scheduler's."""
    return getattr(node.node, "op_overload", None) in _HOME


def _for_home_alone(order: list[Any], fetches: set[Any], results: set[str]) -> set[Any]:
    """The steps that send something home, and those whose outcome only one of them needs, or only they.

    All of a backward is for gradients alone: what several of these are made of is not one's way home.
    """
    goals: dict[Any, set[Any]] = {}
    for node in reversed(order):
        after = node.mpi_node.succ_nodes
        if _sends_home(node):
            goals[node] = {node}
        elif after and goals.keys() >= after and node not in fetches and results.isdisjoint(node.get_buffer_names()):
            reached = set().union(*(goals[other] for other in after))
            if len(reached) == 1 or all(map(_sends_home, after)):
                goals[node] = reached
    return set(goals)


def _with_what_it_needs(node: Any, home: set[Any]) -> set[Any]:
    """A step that sends something home, and those that are there for it alone."""
    found, left = {node}, [node]
    while left:
        more = home.intersection(left.pop().mpi_node.pred_nodes) - found
        found |= more
        left += more
    return found


def _needed_by(group: set[Any], fetches: set[Any]) -> set[Any]:
    """The steps that must come before; of the fetches among them, which come when they are asked for, those before these."""
    found: set[Any] = set()
    left = list(group)
    while left:
        more = left.pop().mpi_node.pred_nodes - found
        found |= more
        left += fetches.intersection(more)
    return found - fetches


def arrange(order: list[Any], results: set[str], is_fetch: Callable[[Any], bool]) -> list[Any]:
    """The same steps, of which those that send something home, with what only they need, follow the last that they are made of.

    Args:
        order: nodes of inductor's scheduler, with what its memory planning has noted on them.
        results: names of the buffers that the graph returns.
        is_fetch: of a node.
    """
    number = {node: position for position, node in enumerate(order)}
    fetches = {node for node in order if is_fetch(node) and node.mpi_node.succ_nodes}
    home = _for_home_alone(order, fetches, results)
    together = [_with_what_it_needs(node, home) for node in order if _sends_home(node)]
    waiting: dict[Any, list[tuple[set[Any], set[Any]]]] = {}  # by each that is missing
    held, free = set(), set()
    for group in sorted(together, key=len):
        missing = _needed_by(group, fetches) - group
        for other in missing:
            waiting.setdefault(other, []).append((group, missing))
        (held if missing else free).update(group)

    found: dict[Any, None] = {}
    ready: list[set[Any]] = []

    def place(nodes: set[Any]) -> None:
        for node in sorted(nodes - found.keys(), key=number.__getitem__):
            place(fetches.intersection(node.mpi_node.pred_nodes))
            found[node] = None
            for group, missing in waiting.get(node, ()):
                missing.discard(node)
                if not missing:
                    ready.append(group)

    for node in order:
        if node not in fetches and (node in free or node not in held):
            place({node})
            while ready:
                place(ready.pop(0))
    return list(found)
