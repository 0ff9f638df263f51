#include "core/arena.h"

#include "core/error.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

namespace offload {
namespace {

constexpr std::size_t kGranule = 512;
// Below this a thread costs more than the pages it would touch.
constexpr std::size_t kPrefaultBytesPerThread = std::size_t{16} << 20;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t roundUp(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

std::size_t pageBytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// The kernel zeroes a page at its first touch, one thread at a few GB/s: several threads make page-locking several times faster.
void prefault(char* data, std::size_t bytes) {
  const std::size_t hardware = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t count = std::clamp<std::size_t>(bytes / kPrefaultBytesPerThread, 1, std::min<std::size_t>(hardware, 16));
  const std::size_t share = roundUp(bytes / count + 1, kHugePage);
  auto touch = [data, bytes](std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < std::min(end, bytes); at += pageBytes()) *static_cast<volatile char*>(data + at) = 0;
  };
  std::vector<std::thread> threads;
  std::size_t mine = share; // and what no thread could be had for
  try {
    for (std::size_t k = count - 1; k > 0; --k) threads.emplace_back(touch, k * share, (k + 1) * share);
  } catch (const std::system_error&) {
    mine = (count - threads.size()) * share;
  }
  touch(0, mine);
  for (auto& thread : threads) thread.join();
}

} // namespace

struct Arena::Region {
  Address begin = 0;
  std::size_t bytes = 0;
  bool pinned = false;
  std::map<Address, std::size_t> free; // ranges not handed out, by begin; neighbours are coalesced
  std::map<Address, std::size_t> used; // ranges handed out or pending
};

Arena::Arena(Link* link, ArenaOptions options) : link_(link), options_(std::move(options)) {}

Arena::~Arena() {
  collect(true);
  for (auto& [begin, region] : regions_) destroy(*region);
}

HostRange Arena::allocate(std::size_t bytes) {
  const std::size_t rounded = roundUp(std::clamp<std::size_t>(bytes, 1, PTRDIFF_MAX), kGranule);
  collect(false);
  HostRange range = take(rounded);
  if (range.data == nullptr) {
    auto region = newRegion(rounded);
    // The system has no more to give: what is merely waiting for copies may do.
    if (!region && collect(true)) range = take(rounded);
    if (!region && range.data == nullptr && trim() > 0) region = newRegion(rounded);
    if (!region && range.data == nullptr) {
      const ArenaStats now = stats();
      throw OutOfMemory(
          OutOfMemory::Where::Host, bytes,
          "offload: the system refused " + std::to_string(bytes) + " bytes of host memory; " + std::to_string(now.allocated) +
              " bytes are in use by offload tensors and " + std::to_string(now.reserved - now.allocated) +
              " are cached: free tensors, or use a machine with more memory.");
    }
    if (region) {
      std::lock_guard lock(mutex_);
      stats_.reserved += region->bytes;
      stats_.reservedPeak = std::max(stats_.reservedPeak, stats_.reserved);
      if (region->pinned) stats_.pinned += region->bytes;
      Region& placed = *(regions_[region->begin] = std::move(region));
      range = carve(placed, placed.begin, placed.bytes, rounded);
    }
  }
  if (options_.poison) std::memset(range.data, 0xFF, rounded);
  return {range.data, bytes, range.pinned};
}

Arena::Region& Arena::regionOf(const void* data) {
  return *std::prev(regions_.upper_bound(reinterpret_cast<Address>(data)))->second;
}

HostRange Arena::take(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  auto fit = freeBySize_.lower_bound({bytes, 0});
  if (fit == freeBySize_.end()) return {};
  const auto [free, begin] = *fit;
  freeBySize_.erase(fit);
  Region& region = regionOf(reinterpret_cast<void*>(begin));
  region.free.erase(begin);
  return carve(region, begin, free, bytes);
}

// Hands out the first `bytes` of a range that is in no free list any more. The lock is held.
HostRange Arena::carve(Region& region, Address begin, std::size_t free, std::size_t bytes) {
  region.used[begin] = bytes;
  if (free > bytes) insertFree(region, begin + bytes, free - bytes);
  stats_.allocated += bytes;
  stats_.allocatedPeak = std::max(stats_.allocatedPeak, stats_.allocated);
  ++stats_.count;
  ++stats_.allocations;
  return {reinterpret_cast<void*>(begin), bytes, region.pinned};
}

void Arena::insertFree(Region& region, Address begin, std::size_t bytes) {
  region.free[begin] = bytes;
  freeBySize_.insert({bytes, begin});
}

void Arena::free(void* data, std::vector<Token> pending) noexcept {
  std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<Address>(data);
  Region& region = regionOf(data);
  stats_.allocated -= region.used.at(begin);
  --stats_.count;
  std::erase_if(pending, [](const Token& token) { return token.knownDone(); });
  if (pending.empty()) {
    giveBack(data);
  } else {
    pendingBytes_ += region.used.at(begin);
    pending_.push_back({data, std::move(pending), nullptr});
  }
}

void Arena::keepAlive(std::shared_ptr<void> owner, std::vector<Token> pending) noexcept {
  std::lock_guard lock(mutex_);
  pending_.push_back({nullptr, std::move(pending), std::move(owner)});
}

// The lock is held.
void Arena::giveBack(void* data) {
  auto begin = reinterpret_cast<Address>(data);
  Region& region = regionOf(data);
  auto used = region.used.find(begin);
  std::size_t bytes = used->second;
  region.used.erase(used);
  auto forget = [&](std::map<Address, std::size_t>::iterator neighbour) {
    freeBySize_.erase({neighbour->second, neighbour->first});
    region.free.erase(neighbour);
  };
  auto next = region.free.lower_bound(begin);
  if (next != region.free.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      forget(previous);
    }
  }
  if (next != region.free.end() && begin + bytes == next->first) {
    bytes += next->second;
    forget(next);
  }
  insertFree(region, begin, bytes);
}

// Gives back pending ranges whose tokens are done, after waiting for all of them if asked; whether there were any.
bool Arena::collect(bool wait) {
  std::vector<Pending> candidates;
  {
    std::lock_guard lock(mutex_);
    candidates.swap(pending_);
  }
  if (candidates.empty()) return false;
  auto isDone = [wait](const Token& token) {
    try {
      if (wait) token.wait();
      return token.done();
    } catch (...) {
      return false; // what the device can't tell is not reused
    }
  };
  std::vector<Pending> still;
  std::vector<Pending> ready;
  for (auto& candidate : candidates) {
    const bool done = std::all_of(candidate.tokens.begin(), candidate.tokens.end(), isDone);
    (done ? ready : still).push_back(std::move(candidate));
  }
  std::lock_guard lock(mutex_);
  for (const auto& range : ready) {
    if (range.data == nullptr) continue;
    pendingBytes_ -= regionOf(range.data).used.at(reinterpret_cast<Address>(range.data));
    giveBack(range.data);
  }
  for (auto& candidate : still) pending_.push_back(std::move(candidate));
  return !ready.empty();
}

std::unique_ptr<Arena::Region> Arena::newRegion(std::size_t bytes) {
  const bool own = bytes >= options_.ownRegionBytes;
  const std::size_t mapped = roundUp(own ? bytes : std::max(bytes, options_.sharedRegionBytes), pageBytes());
  auto region = std::make_unique<Region>();
  void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  region->begin = reinterpret_cast<Address>(data);
  region->bytes = mapped;
  if (link_ == nullptr || !link_->wantsRegistration()) return region;
  std::size_t pinned = 0;
  {
    std::lock_guard lock(mutex_);
    pinned = stats_.pinned;
  }
  madvise(data, mapped, MADV_HUGEPAGE);
  if (pinned + mapped <= options_.pinnedLimit) {
    prefault(static_cast<char*>(data), mapped);
    region->pinned = link_->registerHost(data, mapped);
  }
  if (region->pinned) {
    // A fork would copy every page-locked page on the spot.
    madvise(data, mapped, MADV_DONTFORK);
  } else {
    bool first = false;
    {
      std::lock_guard lock(mutex_);
      first = !std::exchange(warned_, true);
    }
    if (first && options_.warn) {
      options_.warn(
          "offload: " + std::to_string(mapped) + " bytes of host memory could not be page-locked (" + std::to_string(pinned) +
          " bytes are); copies to and from them are slower. Raise `ulimit -l` or the container's limit.");
    }
  }
  return region;
}

void Arena::destroy(Region& region) noexcept {
  void* data = reinterpret_cast<void*>(region.begin);
  if (region.pinned) link_->unregisterHost(data, region.bytes);
  munmap(data, region.bytes);
}

std::size_t Arena::trim() {
  collect(false);
  std::vector<std::unique_ptr<Region>> unused;
  {
    std::lock_guard lock(mutex_);
    for (auto it = regions_.begin(); it != regions_.end();) {
      Region& region = *it->second;
      if (!region.used.empty()) {
        ++it;
        continue;
      }
      freeBySize_.erase({region.bytes, region.begin});
      stats_.reserved -= region.bytes;
      if (region.pinned) stats_.pinned -= region.bytes;
      unused.push_back(std::move(it->second));
      it = regions_.erase(it);
    }
  }
  std::size_t bytes = 0;
  for (auto& region : unused) {
    bytes += region->bytes;
    destroy(*region);
  }
  return bytes;
}

ArenaStats Arena::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void Arena::resetPeaks() {
  std::lock_guard lock(mutex_);
  stats_.allocatedPeak = stats_.allocated;
  stats_.reservedPeak = stats_.reserved;
}

void Arena::validate() const {
  std::lock_guard lock(mutex_);
  auto require = [](bool holds, const char* what) {
    if (!holds) throw Error(std::string("offload: the Arena is inconsistent: ") + what);
  };
  std::size_t reserved = 0;
  std::size_t used = 0;
  std::size_t freeRanges = 0;
  for (const auto& [begin, region] : regions_) {
    reserved += region->bytes;
    std::map<Address, std::size_t> all = region->used;
    for (const auto& [at, bytes] : region->used) used += bytes;
    for (const auto& [at, bytes] : region->free) {
      require(all.emplace(at, bytes).second, "a range is both free and used");
      require(freeBySize_.contains({bytes, at}), "a free range is not listed by size");
      const auto next = region->free.find(at + bytes);
      require(next == region->free.end(), "two free neighbours are not coalesced");
      ++freeRanges;
    }
    Address at = begin;
    for (const auto& [start, bytes] : all) {
      require(start == at, "ranges overlap or leave a gap");
      at += bytes;
    }
    require(at == begin + region->bytes, "ranges don't fill their region");
  }
  require(freeRanges == freeBySize_.size(), "a range listed by size is not free");
  require(reserved == stats_.reserved, "reserved bytes are miscounted");
  require(used == stats_.allocated + pendingBytes_, "allocated bytes are miscounted");
}

} // namespace offload
