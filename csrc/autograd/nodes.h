// Fetch and stash for autograd: each is the other's derivative.
#pragma once

#include "core/purpose.h"

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace offload {

/// An offload tensor on a target of fetchTo(), differentiable.
at::Tensor fetch(const at::Tensor& offload, c10::Device target);

/// Plain ones of one storage, in memory that they share as these do.
std::vector<at::Tensor> fetch(const std::vector<at::Tensor>& offload, c10::Device target);

/// The same for an operation that reads so many bytes of it: see readInPlace(). Undefined where a fetch is due.
at::Tensor lookUp(const at::Tensor& offload, c10::Device target, std::size_t reads);

/// Makes a tensor without history, which has the value of an offload tensor on a target of fetchTo(), in its dtype or in another one,
/// differentiable as a fetch is.
void recordFetch(const at::Tensor& offload, const at::Tensor& fetched, c10::Device target);

/// An offload tensor that requires a gradient, as it is, for an operation that computes elsewhere and gives it one from there.
at::Tensor withGradientFrom(const at::Tensor& offload, c10::Device computed);

/// A result of an operation of ours as an offload tensor, differentiable; nobody else writes to its memory. `computed` is the
/// target of fetchTo() that it was made on: its gradient goes back there.
at::Tensor stash(const at::Tensor& result, c10::Device home, c10::Device computed);

/// A copy on offload of a value from anywhere, below autograd.
at::Tensor stashPlain(const at::Tensor& self, c10::Device home);

/// The target of fetchTo() that a plain tensor, which goes to `home`, was made on.
c10::Device computedOn(const at::Tensor& result, c10::Device home);

/// Has `write` give an offload tensor the value of `work`, which an operation has computed from it on `computed`, and gives it its
/// history; where it can. copy_ would add to the gradient the zeros of what was written over, and they change the sign of a zero.
bool rewrite(const at::Tensor& offload, const at::Tensor& work, c10::Device computed, c10::function_ref<void()> write);

/// What a result is for that is made now: a gradient, an activation.
Purpose purposeOfResult();

/// Gives it the history alone: it has the value already.
bool rebase(const at::Tensor& offload, const at::Tensor& work);

/// Whether operations called now record a graph: grad mode is on and autograd's kernels have not run already.
bool recordsGraph();

} // namespace offload
