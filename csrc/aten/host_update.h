// Operations that update large tensors on the host, which may be done while the program goes on.
#pragma once

#include "aten/op_traits.h"

namespace offload {

/// Where `op` changes large host tensors element by element and can't fail on these: has it done as doOnHost() does, tensor by
/// tensor, and puts its results in the place of its arguments. Otherwise false, and nothing has been done.
bool updateOnHost(const c10::OperatorHandle& op, const OpTraits& traits, torch::jit::Stack& stack);

} // namespace offload
