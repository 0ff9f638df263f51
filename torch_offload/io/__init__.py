"""Files of tensors: what ``torch_offload.load`` is made of."""
