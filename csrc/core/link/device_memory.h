// Where a Link's device memory comes from.
#pragma once

#include "core/link/link.h"

namespace offload {

/// The glue implements this with PyTorch's CUDA caching allocator, so that its limits, statistics and snapshots count our memory.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// See Link::allocate() and Link::free().
  virtual void* allocate(std::size_t bytes, Stream stream) = 0;
  virtual void free(void* device, Stream stream) noexcept = 0;
  virtual MemoryInfo memoryInfo(int device) = 0;
};

} // namespace offload
