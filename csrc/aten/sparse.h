// Sparse tensors of layout COO: two dense tensors, indices and values, that go together.
//
// Note [Sparse tensors]
// A sparse offload tensor is PyTorch's own, of two dense offload tensors. To fetch or stash one is to fetch or stash its parts, and
// where it was born is where its values were; so the generic kernel, the placement rule and the cache know nothing else of it, and
// PyTorch's kernels see sparse tensors of the device that computes.
#pragma once

#include "core/purpose.h"

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace offload {

struct SparseParts {
  at::Tensor indices; // [sparse dimensions, non-zeros]
  at::Tensor values; // [non-zeros, dense dimensions...]
};

/// Whether it is one, and no wrapper of one (functorch's has its keys).
bool isSparse(const at::Tensor& tensor);

/// Neither has history. They are the tensor's own: who writes to them writes to it.
SparseParts partsOf(const at::Tensor& sparse);

/// Calls `visit` with each dense tensor that has a tensor's bytes: both parts of a sparse one, or itself.
template <class Visit>
void visitDense(const at::Tensor& tensor, Visit&& visit) {
  if (!isSparse(tensor)) return visit(tensor);
  const auto [indices, values] = partsOf(tensor);
  visit(indices);
  visit(values);
}

/// A sparse tensor of these parts, on their device, of the shape of `like`.
at::Tensor sparseOf(const SparseParts& parts, const at::Tensor& like);

/// Whether nobody uses a part's memory but its tensor and the caller, together by so many references.
bool isOwnPart(const at::Tensor& part, std::size_t references = 2);

/// Gives a sparse offload tensor what an operation has made of `work`, which had the parts `given`: what it has written to parts that it
/// has kept, and parts in the place of the others. The tensor stays born where it was, and is for what it was for, or for
/// `purpose` where it was empty. Its version is the caller's affair.
void putParts(
    const at::Tensor& sparse, const at::Tensor& work, const SparseParts& given, c10::Device computed, Purpose purpose);

/// Gives a sparse offload tensor parts of its own with the values of another one's, from any device.
void copyParts(const at::Tensor& sparse, const at::Tensor& from);

} // namespace offload
