"""CUDA's streams of random numbers, beside the CPU's."""

import torch
from bits import bits

torch.manual_seed(11)
print(torch.cuda.initial_seed(), bits(torch.rand(100, device="cuda"), torch.rand(100)))
print(bits(torch.cuda.get_rng_state(), torch.get_rng_state()))
state = torch.cuda.get_rng_state()
first = bits(torch.randn(1000, device="cuda"), torch.nn.functional.dropout(torch.ones(1000, device="cuda")))
torch.cuda.set_rng_state(state)
print(
    first == bits(torch.randn(1000, device="cuda"), torch.nn.functional.dropout(torch.ones(1000, device="cuda"))), first
)
with torch.random.fork_rng():
    torch.manual_seed(3)
    print(bits(torch.rand(10, device="cuda"), torch.rand(10)))
print(bits(torch.rand(10, device="cuda"), torch.rand(10)))
generator = torch.Generator("cuda").manual_seed(5)
print(generator.device, bits(torch.randn(20, device="cuda", generator=generator), generator.get_state()))
print(bits(torch.randperm(1000, device="cuda"), torch.multinomial(torch.ones(50, device="cuda"), 10)))
torch.cuda.manual_seed_all(9)
print(bits(torch.nn.init.kaiming_uniform_(torch.empty(32, 32, device="cuda"))), bits(torch.rand(3)))
