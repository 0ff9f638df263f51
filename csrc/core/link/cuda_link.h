// The Link to CUDA devices.
#pragma once

#include "core/link/device_memory.h"
#include "core/link/link.h"

#include <memory>

namespace offload {

/// Throws Error when CUDA can't be used. Device memory comes from `memory`.
std::unique_ptr<Link> makeCudaLink(std::unique_ptr<DeviceMemory> memory);

} // namespace offload
