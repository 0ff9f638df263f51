// Whether a vector kernel has the bits of PyTorch's operation: Note [Vector steps].
#pragma once

#include "aten/vector/step.h"

namespace offload {

/// Whether a step, each of whose arguments has a register of its own, and the vector step for it give the same on samples of all kinds
/// of numbers; any NaN is as good as another. `ofFew`: also where they are given a few elements at a time.
bool sameBits(const ElementwiseStep& step, const VectorStep& vector, c10::ScalarType type, bool ofFew);

} // namespace offload
