// The Pin's twin for host bytes.
#pragma once

#include "core/block.h"

namespace offload {

class Residency;

/// Permission to read or to write the host bytes of a Block. Taking one waits until the newest bytes are home, and, to write,
/// until nothing reads them any more. While it is held no copy into the Block is left in flight. Letting go of one that writes
/// bumps the version. Every host access of ours goes through one.
class HostLease {
 public:
  HostLease() = default;
  HostLease(HostLease&& other) noexcept;
  HostLease& operator=(HostLease&& other) noexcept;
  ~HostLease();
  /// For a process without a cache, where nothing is in the way of a lease. Others learn of what was written under it.
  static HostLease uncached(Block& block, Access access) {
    return {nullptr, block, access};
  }

  void* data() const noexcept;
  explicit operator bool() const noexcept {
    return block_ != nullptr;
  }

 private:
  friend class Residency;
  HostLease(Residency* residency, Block& block, Access access) : residency_(residency), block_(&block), access_(access) {}
  void letGo() noexcept;

  Residency* residency_ = nullptr;
  Block* block_ = nullptr;
  Access access_ = Access::Read;
};

} // namespace offload
