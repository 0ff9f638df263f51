// Runs an operation on host bytes, in place and without a copy.
#pragma once

#include "aten/op_traits.h"

namespace offload {

/// Calls `op` on CPU aliases of its offload operands, under leases. Operands that it writes to are given back as themselves; new
/// results go through `stash` where the placement says so. An update of large tensors may be done later: Note [Host jobs].
void runOnHost(
    const c10::OperatorHandle& op, const OpTraits& traits, torch::jit::Stack& stack,
    const std::function<at::Tensor(const at::Tensor&)>& stash);

/// Generators and devices among the arguments as tensors of `type` take them.
void useArgumentsOf(c10::DeviceType type, const OpTraits& traits, torch::jit::Stack& stack);

} // namespace offload
