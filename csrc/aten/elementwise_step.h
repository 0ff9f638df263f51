// One operation of an elementwise program.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace offload {

/// Where an argument is a register, its value is taken from there. Registers are numbered from 0: first the operands, then
/// temporaries.
struct ElementwiseStep {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments; // by the schema, all of them
  std::vector<std::pair<std::size_t, std::size_t>> registers; // argument and register
};

/// A number that Python code gave for a tensor: nobody else has it, and it has no say in dtypes.
inline bool isWrapped(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

} // namespace offload
