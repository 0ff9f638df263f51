// The HostLease's twin for work on a device.
#pragma once

#include "core/block.h"

namespace offload {

class Residency;

/// Permission to read host bytes of a Block where they are, over the link, for work that is enqueued on one stream while it is held:
/// for who reads few of many bytes, and keeps nothing. Move-only. A write to the host bytes waits for that work once the lease is
/// gone, and for nobody before: who enqueues lets go of it right after, in the same thread.
class DeviceLease {
 public:
  DeviceLease() = default;
  DeviceLease(DeviceLease&& other) noexcept;
  DeviceLease& operator=(DeviceLease&& other) noexcept;
  ~DeviceLease();

  /// Where the extent begins.
  const void* data() const noexcept;
  explicit operator bool() const noexcept {
    return block_ != nullptr;
  }

 private:
  friend class Residency;
  DeviceLease(Residency& residency, Block& block, Extent extent, Stream stream)
      : residency_(&residency), block_(&block), extent_(extent), stream_(stream) {}
  void letGo() noexcept;

  Residency* residency_ = nullptr;
  Block* block_ = nullptr;
  Extent extent_;
  Stream stream_;
};

} // namespace offload
