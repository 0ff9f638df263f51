// Steps of elementwise programs that vector kernels do.
//
// Note [Vector steps]
// PyTorch's kernels, called for a piece, cost a microsecond each and read and write what the second-level cache holds. A vector
// kernel costs nanoseconds, so steps that follow each other may be done to what the first level holds, and the time is memory's.
// The bits must be PyTorch's all the same, whose kernels may round otherwise in another version, compiler or set of
// instructions. So before a kernel is used for the first time, PyTorch's operation and the kernel are done to samples of all kinds of
// numbers, and where a bit differs (but that of NaNs any is as good as another) the operation stays PyTorch's. There is none of a
// maximum, as that of two zeros depends on where in a tensor they are.
#pragma once

#include "aten/elementwise_step.h"
#include "aten/vector/kernels.h"

#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <span>

namespace offload {

struct VectorStep {
  VectorKernel kernel = nullptr;
  std::size_t to = 0; // registers
  std::array<std::size_t, 3> from{};
  double number = 0.0;
};

/// What does the same to registers of one type; without a kernel where none does.
VectorStep vectorStep(const ElementwiseStep& step, c10::ScalarType type);

/// Does the steps to `count` elements from each register's address on.
void runVectorSteps(
    std::span<const VectorStep> steps, std::span<std::byte* const> registers, std::size_t count, std::size_t elementBytes);

} // namespace offload
