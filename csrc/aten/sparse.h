// Sparse tensors of layout COO: two dense tensors, indices and values, that go together.
//
// Note [Sparse tensors]
// A sparse offload tensor is PyTorch's own, of two dense offload tensors. To fetch or stash one is to fetch or stash its parts, and
// where it was born is where its values were; so the generic kernel, the placement rule and the cache know nothing else of it, and
// PyTorch's kernels see sparse tensors of the device that computes.
#pragma once

#include <ATen/core/Tensor.h>

namespace offload {

struct SparseParts {
  at::Tensor indices; // [sparse dimensions, non-zeros]
  at::Tensor values; // [non-zeros, dense dimensions...]
};

/// Whether it is one, and no wrapper of one (functorch's has its keys).
bool isSparse(const at::Tensor& tensor);

/// Neither has history. They are the tensor's own: who writes to them writes to it.
SparseParts partsOf(const at::Tensor& sparse);

/// A sparse tensor of these parts, on their device, of the shape of `like`.
at::Tensor sparseOf(const SparseParts& parts, const at::Tensor& like);

/// Gives a sparse tensor these parts in the place of its own, and the shape of `like`. Its version is the caller's affair.
void replaceParts(const at::Tensor& sparse, const SparseParts& parts, const at::Tensor& like);

} // namespace offload
