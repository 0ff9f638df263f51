// How an Arena takes memory from the system and gives it back.
#include "core/arena.h"

#include <algorithm>

namespace offload {
namespace {

// A region that is shared has this part of all bytes, so that what is left over in the last one is little; but no fewer than a region
// is worth.
constexpr std::size_t kShare = 64;
constexpr std::size_t kLeastShared = std::size_t{1} << 20;

std::size_t minus(std::size_t from, std::size_t what) {
  return from - std::min(from, what);
}

} // namespace

// What there is, else new memory: page-locked if that is wanted and may be had. Else, and only where it may not, pageable memory is
// taken, and made.
HostRange Arena::grow(std::size_t bytes, HostKind wanted) {
  if (HostRange range = take(bytes, wanted); range.data != nullptr) return range;
  trimExcess(bytes);
  if (wanted == HostKind::Locked) {
    if (RegionPtr region = lockedRegion(bytes)) return place(std::move(region), bytes);
    if (HostRange range = take(bytes, HostKind::Pageable); range.data != nullptr) return range;
    warn(bytes);
  }
  const std::size_t most = mostHeld();
  std::size_t size = 0;
  {
    const Lock lock(mutex_);
    size = regionFor(lock, bytes);
    if (size > minus(most, ranges_.reserved())) return {};
  }
  auto region = std::make_unique<ArenaRegion>();
  region->memory = HostRegion::map(size);
  return region->memory ? place(std::move(region), bytes) : HostRange{};
}

// The first range of a new region, which no other thread sees before.
HostRange Arena::place(RegionPtr region, std::size_t bytes) {
  const Lock lock(mutex_);
  const HostKind kind = region->kind;
  const std::size_t before = ranges_.reserved();
  ranges_.add(std::move(region));
  stats_.reservedEver += ranges_.reserved() - before;
  stats_.reservedPeak = std::max(stats_.reservedPeak, ranges_.reserved());
  return carve(lock, bytes, kind);
}

std::size_t Arena::leastRegion(std::size_t bytes) const {
  return wholePages(std::max(bytes, slabs_.slabFor(bytes)));
}

// A shared region has room for a whole number of such requests: of many equal ones nothing is left over but in the last region.
std::size_t Arena::regionFor(const Lock& /*lock*/, std::size_t bytes) const {
  const std::size_t unit = std::max(bytes, slabs_.slabFor(bytes));
  const std::size_t shared = std::min(std::max(ranges_.reserved() / kShare, kLeastShared), options_.sharedRegionBytes);
  if (bytes >= options_.ownRegionBytes || unit >= shared) return leastRegion(bytes);
  return wholePages(shared / unit * unit);
}

// Null where the bounds leave no room, or the system refuses. A refusal may be for the sum of what is locked, or for the size: so
// there is a second try with the least that does, after giving back what is locked and unused.
Arena::RegionPtr Arena::lockedRegion(std::size_t bytes) {
  for (const bool exact : {false, true}) {
    const std::size_t size = grant(bytes, exact);
    if (size == 0) return nullptr;
    // Memory that nobody uses and that isn't even locked makes way.
    release(SIZE_MAX, 0);
    auto region = std::make_unique<ArenaRegion>();
    region->memory = HostRegion::map(size);
    if (region->memory) {
      region->memory.hideFromChildren();
      const bool there = !options_.prefault || region->memory.populate();
      if (there && link_->registerHost(region->memory.data(), size)) {
        region->kind = HostKind::Locked;
        const Lock lock(mutex_);
        budget_.settle(size);
        return region;
      }
    }
    region.reset();
    {
      const Lock lock(mutex_);
      budget_.remove(size);
      budget_.refuse(size);
    }
    release(0, SIZE_MAX);
  }
  return nullptr;
}

// Bytes for a new locked region, counted as locked from now on; 0 where there is no room for the request. Cached regions make room.
std::size_t Arena::grant(std::size_t bytes, bool exact) {
  look();
  const std::size_t least = leastRegion(bytes);
  for (const bool last : {false, true}) {
    std::size_t shortage = 0;
    {
      const Lock lock(mutex_);
      const std::size_t room = budget_.room();
      if (room >= least) {
        std::size_t size = exact ? least : regionFor(lock, bytes);
        // Half of the rest, so that many can share what little is left, and a bound that is only guessed is not tried page by page.
        if (size > room) size = std::max(least, wholePages(room / 2));
        budget_.add(size);
        return size;
      }
      shortage = least - room;
      if (last || ranges_.unused(HostKind::Locked) < shortage) return 0;
    }
    release(0, shortage);
  }
  return 0;
}

// Whether there is room for a new locked region, what is cached included.
bool Arena::mayLock(std::size_t bytes) {
  look();
  const std::size_t least = leastRegion(bytes);
  const Lock lock(mutex_);
  return minus(least, budget_.room()) <= ranges_.unused(HostKind::Locked);
}

// Bytes that regions may have together.
std::size_t Arena::mostHeld() {
  look();
  const Lock lock(mutex_);
  return budget_.most();
}

void Arena::look() {
  ArenaBudget::Before before;
  {
    const Lock lock(mutex_);
    if (!budget_.stale()) return;
    before = budget_.before();
  }
  const MemoryLimits memory = options_.memoryLimits ? options_.memoryLimits() : readMemoryLimits();
  const Lock lock(mutex_);
  budget_.refresh(memory, before);
}

void Arena::warn(std::size_t bytes) {
  std::string sentence;
  {
    const Lock lock(mutex_);
    if (std::exchange(warned_, true)) return;
    sentence = budget_.refusal(leastRegion(bytes));
  }
  if (options_.warn) options_.warn(sentence);
}

// Sizes that change all the time (a cache that grows by a token) would leave a region for each: those that nothing uses go back
// before the Arena grows far past the most that was ever in use.
void Arena::trimExcess(std::size_t bytes) {
  std::size_t excess = 0;
  {
    const Lock lock(mutex_);
    const std::size_t held = stats_.allocated + pendingBytes_ + bytes;
    const std::size_t most = std::max(mostHeld_, held);
    excess = minus(ranges_.reserved() + bytes, most + most / 8 + options_.sharedRegionBytes);
  }
  const std::size_t gone = excess > 0 ? release(excess, 0) : 0;
  if (gone < excess) release(0, excess - gone);
}

// Gives regions that nothing uses back to the system, for this many bytes of each kind; the bytes of all.
std::size_t Arena::release(std::size_t pageable, std::size_t locked) {
  ArenaRanges::Regions regions;
  {
    const Lock lock(mutex_);
    ranges_.removeUnused(pageable, HostKind::Pageable, regions);
    ranges_.removeUnused(locked, HostKind::Locked, regions);
  }
  return destroy(std::move(regions));
}

std::size_t Arena::destroy(ArenaRanges::Regions regions) noexcept {
  std::size_t bytes = 0;
  std::size_t locked = 0;
  for (const auto& region : regions) {
    bytes += region->memory.bytes();
    if (region->kind == HostKind::Locked) locked += region->memory.bytes();
  }
  if (locked > 0) {
    const Lock lock(mutex_);
    budget_.leave(locked);
  }
  for (const auto& region : regions) {
    if (region->kind == HostKind::Locked) link_->unregisterHost(region->memory.data(), region->memory.bytes());
  }
  regions.clear();
  const Lock lock(mutex_);
  budget_.remove(locked);
  return bytes;
}

} // namespace offload
