#include "core/host_lease.h"

#include "core/residency.h"

namespace offload {

HostLease::HostLease(HostLease&& other) noexcept
    : residency_(other.residency_), block_(std::exchange(other.block_, nullptr)), access_(other.access_) {}

HostLease& HostLease::operator=(HostLease&& other) noexcept {
  if (this != &other) {
    letGo();
    residency_ = other.residency_;
    block_ = std::exchange(other.block_, nullptr);
    access_ = other.access_;
  }
  return *this;
}

HostLease::~HostLease() {
  letGo();
}

void* HostLease::data() const noexcept {
  return block_ != nullptr ? block_->data : nullptr;
}

void HostLease::letGo() noexcept {
  if (Block* block = std::exchange(block_, nullptr)) residency_->endLease(*block, access_);
}

} // namespace offload
