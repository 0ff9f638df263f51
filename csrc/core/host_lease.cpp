#include "core/host_lease.h"

#include "core/residency.h"
#include "core/shared_memory.h"

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
  Block* const block = std::exchange(block_, nullptr);
  if (block == nullptr) return;
  if (residency_ != nullptr) {
    residency_->endLease(*block, access_);
  } else if (access_ == Access::Write && block->shared) {
    block->shared->bump();
  }
}

} // namespace offload
