// Copies of gradients whose elements lie apart or repeat.
#pragma once

#include <ATen/core/Tensor.h>

namespace offload {

/// A copy whose strides are of the same kind, with gaps as small as can be: what adds it up next goes by what is contiguous, what
/// is repeated and what could be walked as one dimension. Not differentiable.
at::Tensor cloneWithGaps(const at::Tensor& value);

} // namespace offload
