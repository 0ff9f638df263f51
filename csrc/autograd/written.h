// Operands of the generic kernel that are written to.
#pragma once

#include "aten/op_traits.h"
#include "aten/placement.h"
#include "aten/sparse.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace offload {

/// One that is written to where it isn't at home: the operation gets a copy, and the operand is then copied from.
struct Written {
  at::Tensor source;
  at::Tensor work;
  ArgumentTraits argument;
  SparseParts parts; // of work, if that is sparse, as it was given
};

/// The copy, of what was fetched. What is expanded stays so: whether an operation may write to that is for the operation to say. So does
/// what shares memory.
at::Tensor workFor(const at::Tensor& value, const at::Tensor& source);

/// Whether it gets a new value as a whole, which the cache takes; its copy needs none.
bool isOverwritten(const OpTraits& traits, const Placement& placement, const at::Tensor& offload);
at::Tensor emptyAs(const at::Tensor& offload, c10::Device device);

/// Whether any operand is more than bytes, that is given away with them: has a tangent, or a level of functorch's.
bool anyHasMore(const OpTraits& traits, torch::jit::Stack& stack);

void copyBack(const Written& written, c10::Device computed);
/// After a failure, of what had been written by then.
void keepWritten(const Written& written, c10::Device computed) noexcept;

} // namespace offload
