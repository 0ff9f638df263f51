"""``torch_offload.saved_tensors`` around programs of all kinds: compiled, checkpointed by a policy, on streams, of other tensors."""

import contextlib
import os

import pytest
import torch
from compiling import compiled
from helpers import COMPUTE, GPU, OFFLOAD, assert_same, at, data, grads, layers
from saving import both_ways, cached, everything, held, sent_home, stats
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_offload
from torch_offload import offload_activations, saved_tensors
