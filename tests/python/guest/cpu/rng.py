"""Streams of random numbers, their states, and forks of them."""

import torch
from bits import bits, outcome

torch.manual_seed(11)
print(torch.initial_seed(), bits(torch.rand(100), torch.randn(100), torch.randperm(50), torch.randint(9, (7,))))
state = torch.get_rng_state()
first = bits(
    torch.empty(64).exponential_(), torch.bernoulli(torch.full((64,), 0.4)), torch.multinomial(torch.ones(8), 4)
)
torch.set_rng_state(state)
second = bits(
    torch.empty(64).exponential_(), torch.bernoulli(torch.full((64,), 0.4)), torch.multinomial(torch.ones(8), 4)
)
print(first, second)

generator = torch.Generator().manual_seed(5)
print(generator.device, bits(torch.randn(20, generator=generator), generator.get_state()))
print(outcome(lambda: torch.Generator("nonsense")))
with torch.random.fork_rng():
    print(bits(torch.rand(3)))
print(bits(torch.rand(3)))

layers = [torch.nn.Linear(5, 6), torch.nn.Conv2d(2, 3, 3), torch.nn.Embedding(4, 4), torch.nn.LSTM(3, 3)]
print(bits(*(p for layer in layers for p in layer.parameters())))
print(bits(torch.nn.functional.dropout(torch.ones(100), 0.3), torch.nn.init.orthogonal_(torch.empty(6, 6))))
print(outcome(lambda: torch.manual_seed(2**63).device), outcome(lambda: torch.seed() >= 0))
