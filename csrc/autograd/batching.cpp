// torch.vmap: fetch and stash move a whole batch at once, where PyTorch's fallback takes one slice after the other.
#include "compat/registration.h"

#include <ATen/core/stack.h>
#include <ATen/functorch/BatchedTensorImpl.h>

namespace offload {
namespace {

// Of an operation that takes a tensor and a device. Where the tensor's batch is an outer one, it moves as a whole all the same.
void moveBatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  c10::IValue& self = torch::jit::peek(*stack, 0, 2);
  const at::Tensor batch = self.toTensor();
  const auto* impl = at::functorch::maybeGetBatchedImpl(batch);
  if (impl == nullptr) return op.callBoxed(stack);
  self = impl->value();
  op.callBoxed(stack);
  stack->back() = at::functorch::makeBatched(stack->back().toTensor(), impl->bdim(), impl->level());
}

} // namespace

OFFLOAD_LIBRARY_IMPL(offload, FuncTorchBatched, m) {
  m.impl("fetch", torch::CppFunction::makeFromBoxedFunction<&moveBatch>());
  m.impl("stash", torch::CppFunction::makeFromBoxedFunction<&moveBatch>());
}

} // namespace offload
