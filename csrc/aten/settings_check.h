// Settings that do nothing, or hurt, say so.
#pragma once

#include "aten/context.h"

namespace offload {

/// Warns of variables TORCH_OFFLOAD_* that are no settings, and of settings without effect on this backend.
void checkEnvironment(Backend backend);

/// What is wrong with so many bytes for `what`, in one sentence: more than the memory of the device, or no cache at all. Else "".
std::string problemOf(const char* what, std::size_t bytes, Backend backend, std::size_t deviceBytes);

} // namespace offload
