// Whether a vector kernel has the bits of PyTorch's operation: Note [Vector steps].
#pragma once

#include "aten/vector/step.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace offload {

/// What registers may hold: all kinds of numbers, the same at every call.
std::vector<at::Tensor> samples(c10::ScalarType type, std::size_t registers);

/// Whether a step and the vector step for it give the same, done to copies of samples; any NaN is as good as another.
bool sameBits(const ElementwiseStep& step, const VectorStep& vector, const std::vector<at::Tensor>& samples);

} // namespace offload
