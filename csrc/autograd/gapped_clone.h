// Copies of gradients whose elements lie apart or repeat.
#pragma once

#include <ATen/core/Tensor.h>

namespace offload {

/// A copy whose strides are of the same kind, with small gaps; those between rows of kAlignment bytes and more leave the remainders by
/// that as they are. What takes it next goes by what is contiguous, what is repeated, what could be walked as one dimension and how
/// rows are aligned. Not differentiable.
at::Tensor cloneWithGaps(const at::Tensor& value);

} // namespace offload
