// memcpy for many megabytes.
#pragma once

#include <cstddef>

namespace offload {

/// With a few threads where that pays: one alone moves less than half of what a PCIe link carries.
void copyHost(void* to, const void* from, std::size_t bytes) noexcept;

} // namespace offload
