"""Tensors through queues and shared memory between spawned and forked processes."""

import torch
import torch.multiprocessing as mp
from bits import bits


def work(shared, inbox, outbox):
    x = inbox.get()
    shared.add_(x.sum())
    outbox.put((x * 2, torch.get_num_threads() > 0, shared.is_shared()))
    # The tensor's memory lives in this process until the other one has opened it.
    inbox.get()


def train(rank, model):
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    print(rank, bits(*(p.grad for p in model.parameters())), flush=True)


if __name__ == "__main__":
    for method in ("spawn", "fork"):
        context = mp.get_context(method)
        shared = torch.zeros(3).share_memory_()
        inbox, outbox = context.Queue(), context.Queue()
        process = context.Process(target=work, args=(shared, inbox, outbox))
        process.start()
        inbox.put(torch.arange(5.0))
        doubled, has_threads, is_shared = outbox.get()
        print(method, bits(doubled, shared), has_threads, is_shared)
        inbox.put(None)
        process.join()
        print(process.exitcode)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model.share_memory()
    mp.spawn(train, (model,), nprocs=1)
