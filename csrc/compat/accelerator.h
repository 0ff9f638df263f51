// Keeps PyTorch's accelerator what it was before a PrivateUse1 backend was registered.
#pragma once

#include <string>

namespace offload::compat {

struct AcceleratorReport {
  int getSlots = 0; ///< slots of at::accelerator::getAccelerator that reach the corrected answer
  int isSlots = 0; ///< the same of at::accelerator::isAccelerator
  std::string where; ///< the libraries that these slots are in, or why there are none
};

/// Makes PyTorch answer as if PrivateUse1 were no accelerator; see Note [A memory, not an accelerator].
/// Touches nothing where PyTorch's answers are right by themselves, and nothing with TORCH_OFFLOAD_ACCELERATOR=keep in the
/// environment. To be called with the GIL, after the backend's name and its device guard are registered. May be called again:
/// then PyTorch's libraries that were loaded in between are corrected too.
/// Throws std::runtime_error, one sentence that says what to do, where PyTorch's answers stay wrong.
AcceleratorReport correctAccelerator();

} // namespace offload::compat
