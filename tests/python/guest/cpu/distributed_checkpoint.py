"""torch.distributed.checkpoint of one process writes and reads CPU tensors."""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from bits import bits

state = {"weight": torch.arange(1000.0), "nested": {"bias": torch.ones(3, dtype=torch.bfloat16)}, "step": 7}
with tempfile.TemporaryDirectory() as folder:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    read = {"weight": torch.zeros(1000), "nested": {"bias": torch.zeros(3, dtype=torch.bfloat16)}, "step": 0}
    dcp.load(read, checkpoint_id=folder, no_dist=True)
print(bits(read["weight"], read["nested"]["bias"]), read["step"])
