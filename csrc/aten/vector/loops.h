// What loops.cpp is compiled to: once for each set of instructions.
#pragma once

#include "aten/vector/kernels.h"

namespace offload {

namespace avx2 {
VectorKernel kernel(VectorOp op, VectorType type);
}
namespace avx512 {
VectorKernel kernel(VectorOp op, VectorType type);
}

} // namespace offload
