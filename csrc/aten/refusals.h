// One sentence each for what the offload device does not hold.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace offload {

/// Raises where a value is neither dense nor sparse in COO: compressed, nested, quantised, of another library's layout.
void checkLayout(const at::Tensor& value);

/// Raises: what `op` was called with, or would make, is neither dense nor sparse in COO.
[[noreturn]] void refuseLayoutOf(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Raises where one of the operands is nested and `op` writes to one of offload, or should be differentiated.
void refuseNested(const c10::OperatorHandle& op, const torch::jit::Stack& stack, bool writes, bool differentiable);

/// Raises: tensors of PyTorch's own quantised dtypes, whose values are more than their bytes, have no offload kernels.
[[noreturn]] void refuseQuantized(at::ScalarType type);

/// Raises: page-locked memory is asked for.
[[noreturn]] void refusePinned();

/// Lets torch.distributed say in one sentence that no backend takes offload tensors; to be called once, when the first one is made.
void interceptCollectives();

} // namespace offload
