#include "core/bounce_ring.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>

namespace offload {

struct BounceRing::Region {
  Region(Link& l, void* memory, std::size_t size) : link(l), data(memory), bytes(size) {}
  ~Region() {
    try {
      for (const Chunk& chunk : chunks) chunk.lastUse.wait();
    } catch (...) {
      return; // what the device can't tell is kept
    }
    if (registered) link.unregisterHost(data, bytes);
    munmap(data, bytes);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  bool owns(const Chunk* chunk) const {
    return chunk >= chunks.data() && chunk < chunks.data() + chunks.size();
  }

  Link& link;
  void* const data;
  const std::size_t bytes;
  bool registered = false;
  std::array<Chunk, kChunks> chunks;
};

BounceRing::BounceRing(Link& link, std::size_t chunkBytes, Locking locking)
    : link_(link), chunkBytes_(chunkBytes), locking_(locking), refused_(!mayHave()) {}

BounceRing::~BounceRing() = default;

bool BounceRing::mayHave() const {
  return locking_ == Locking::Preferred || link_.wantsRegistration();
}

std::size_t BounceRing::bytes() const {
  const std::lock_guard lock(mutex_);
  return regions_.size() * kChunks * chunkBytes_;
}

BounceRing::Taken BounceRing::take() {
  Chunk* chunk = oldest();
  while (chunk == nullptr) {
    {
      const std::lock_guard lock(mutex_);
      if (refused_) return {nullptr, {this}};
    }
    auto region = newRegion();
    {
      const std::lock_guard lock(mutex_);
      if (region == nullptr) {
        refused_ = locking_ == Locking::Required;
        return {nullptr, {this}};
      }
      regions_.push_back(std::move(region));
      idle_.reserve(regions_.size() * kChunks); // so that giving back never allocates
      for (Chunk& fresh : regions_.back()->chunks) idle_.push_back(&fresh);
    }
    chunk = oldest();
  }
  return {chunk, {this}};
}

void BounceRing::exchange(Taken& chunk) {
  if (Taken other = take()) chunk = std::move(other);
}

BounceRing::Chunk* BounceRing::oldest() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return nullptr;
  Chunk* chunk = idle_.front();
  idle_.erase(idle_.begin());
  return chunk;
}

void BounceRing::giveBack(Chunk* chunk) noexcept {
  const std::lock_guard lock(mutex_);
  idle_.push_back(chunk);
}

void BounceRing::trim() {
  const bool refused = !mayHave();
  std::vector<std::unique_ptr<Region>> unused; // goes without the mutex
  {
    const std::lock_guard lock(mutex_);
    unused.reserve(regions_.size());
    for (auto& region : regions_) {
      const auto isOf = [&region](const Chunk* chunk) { return region->owns(chunk); };
      if (std::count_if(idle_.begin(), idle_.end(), isOf) < static_cast<std::ptrdiff_t>(kChunks)) continue;
      std::erase_if(idle_, isOf);
      unused.push_back(std::move(region));
    }
    std::erase(regions_, nullptr);
    refused_ = refused;
  }
}

std::unique_ptr<BounceRing::Region> BounceRing::newRegion() {
  const std::size_t bytes = kChunks * chunkBytes_;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  auto region = std::make_unique<Region>(link_, data, bytes);
  region->registered = link_.wantsRegistration() && link_.registerHost(data, bytes);
  if (!region->registered && locking_ == Locking::Required) return nullptr;
  // A fork would copy every page-locked page on the spot.
  madvise(data, bytes, MADV_DONTFORK);
  for (std::size_t i = 0; i < kChunks; ++i) region->chunks[i].data = static_cast<std::byte*>(data) + i * chunkBytes_;
  return region;
}

} // namespace offload
