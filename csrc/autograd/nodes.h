// Fetch and stash for autograd: each is the other's derivative.
#pragma once

#include <ATen/core/Tensor.h>

namespace offload {

/// An offload tensor on a target of fetchTo(), differentiable.
at::Tensor fetch(const at::Tensor& offload, c10::Device target);

/// A result of an operation of ours as an offload tensor, differentiable; nobody else writes to its memory. `computed` is the
/// target of fetchTo() that it was made on: its gradient goes back there.
at::Tensor stash(const at::Tensor& result, c10::Device home, c10::Device computed);

/// Note [Backward without a GPU]
/// Autograd runs the nodes of a device that isn't the CPU in a thread of its own, which it starts for as many devices as the guards
/// report. With that thread a process can't fork and go on ("backward, fork, backward"), nor always exit cleanly. So where there is
/// no GPU our guard reports no device, and a thread that records a graph over offload tensors runs its backward by itself, as it
/// does for CPU tensors. To be called wherever such a graph is recorded; it does nothing where there is a GPU.
void keepBackwardOnCaller();

/// Whether operations called now record a graph: grad mode is on and autograd's kernels have not run already.
bool recordsGraph();

} // namespace offload
