"""Backward, fork, backward: in the child, in the parent, and in the child's child."""

import os
import threading

import torch
from bits import bits, outcome

weight = torch.arange(6.0, requires_grad=True)


def backward() -> str:
    (weight * weight).sum().backward()
    return bits(weight.grad)


def in_thread() -> None:
    print("thread", outcome(backward), flush=True)


def child(depth: int) -> None:
    print("child", depth, outcome(backward), flush=True)
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    if depth:
        fork(depth - 1)


def fork(depth: int) -> None:
    pid = os.fork()
    if pid == 0:
        child(depth)
        os._exit(0)
    print("status", os.waitpid(pid, 0)[1], flush=True)


fork(0)
print("parent", outcome(backward), flush=True)
fork(1)
print("parent", outcome(backward), flush=True)
