// Settings that do nothing, or hurt, say so.
#pragma once

#include "aten/context.h"

#include <optional>
#include <string>

namespace offload {

/// A budget's bytes: a number of them, a share of the device's memory ("40%"), or "auto", which is none. Throws
/// std::invalid_argument with a sentence for anything else.
std::optional<std::size_t> budgetOf(const std::string& text, std::size_t deviceBytes);

/// Warns of variables TORCH_OFFLOAD_* that are no settings, and of settings without effect on this backend.
void checkEnvironment(Backend backend);

/// What is wrong with so many bytes for `what`, in one sentence: more than the memory of the device, or no cache at all. Else "".
/// `said` is what was asked for, in words.
std::string problemOf(const char* what, const std::string& said, std::size_t bytes, Backend backend, std::size_t deviceBytes);

} // namespace offload
