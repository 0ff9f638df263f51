"""DataLoader with forked and spawned workers: order, seeds and values."""

import torch
from bits import bits
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Noise(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, torch.rand(3), torch.randn(2, 2).inverse()


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        yield from ((info.id, torch.initial_seed() - info.id, torch.randint(100, (1,)).item()) for _ in range(3))


if __name__ == "__main__":
    torch.manual_seed(7)
    # A backward pass in the parent, before it forks.
    torch.ones(3, requires_grad=True).square().sum().backward()
    for workers in (0, 2):
        loader = DataLoader(Noise(), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        for _ in range(2):
            print(workers, [(index.tolist(), bits(noise, inverse)) for index, noise, inverse in loader])
    print([row.tolist() for batch in DataLoader(Stream(), batch_size=3, num_workers=2) for row in batch])
    spawned = DataLoader(Noise(), batch_size=6, num_workers=1, multiprocessing_context="spawn")
    print([(index.tolist(), bits(noise, inverse)) for index, noise, inverse in spawned])
