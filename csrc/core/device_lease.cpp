#include "core/device_lease.h"

#include "core/forked.h"
#include "core/residency.h"

namespace offload {
namespace {

// Whoever reads in place fetches nothing, and after so many the budget may be another.
constexpr std::uint64_t kLookedForEvery = 64;

} // namespace

DeviceLease::DeviceLease(DeviceLease&& other) noexcept
    : residency_(other.residency_),
      block_(std::exchange(other.block_, nullptr)),
      extent_(other.extent_),
      stream_(other.stream_) {}

DeviceLease& DeviceLease::operator=(DeviceLease&& other) noexcept {
  if (this != &other) {
    letGo();
    residency_ = other.residency_;
    block_ = std::exchange(other.block_, nullptr);
    extent_ = other.extent_;
    stream_ = other.stream_;
  }
  return *this;
}

DeviceLease::~DeviceLease() {
  letGo();
}

const void* DeviceLease::data() const noexcept {
  return block_ != nullptr ? static_cast<const std::byte*>(block_->data) + extent_.begin : nullptr;
}

void DeviceLease::letGo() noexcept {
  if (Block* const block = std::exchange(block_, nullptr)) residency_->endDeviceLease(*block, extent_, stream_);
}

DeviceLease Residency::leaseToDevice(Block& block, Extent extent, Stream stream, std::size_t reads) {
  const auto audited = audit("leaseToDevice", &block);
  hostErrors_.raise();
  settle();
  requireWithin(block, extent);
  // Where memory is not worth locking, devices read the Arena's as it is.
  const bool locked =
      memoryOf(block) == HostMemory::Pinned || (block.kind == BlockKind::Pageable && !link_.wantsRegistration());
  if (extent.bytes() == 0 || !locked || !link_.readsHostMemory(stream.device) || isCaptured(stream)) return {};
  Device& dev = device(stream.device);
  look(dev);
  std::vector<Token> after;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    hostErrors_.raise(); // as in lease()
    if (newestSlot(block, extent, stream.device) || dirtyOf(block)) return {};
    block.writers.appendTo(after);
    ResidencyStats& stats = dev.queue.stats;
    if (++stats.readsInPlace % kLookedForEvery == 0) dev.lookDue = true;
    stats.bytesReadInPlace += reads;
  }
  std::erase_if(after, [](const Token& token) { return token.done(); });
  dev.stalls.orderBefore(after, stream);
  return {*this, block, extent, stream};
}

void Residency::endDeviceLease(Block& block, Extent extent, Stream stream) noexcept {
  if (isForked()) return;
  const auto audited = audit("endDeviceLease", &block);
  {
    const Lock lock(mutex_);
    if (closed_) return;
  }
  link_.deviceAccess(static_cast<const std::byte*>(block.data) + extent.begin, extent.bytes(), Access::Read, stream);
  const Token used = events_.record(stream);
  TokenSet& all = device(stream.device).readers;
  std::vector<TokenSet*> many;
  {
    const Lock lock(mutex_);
    block.readers.add(used);
    all.add(used);
    for (TokenSet* const set : {&block.readers, &all}) {
      if (set->all().size() > kManyTokens) many.push_back(set);
    }
  }
  forgetDone(many);
}

} // namespace offload
