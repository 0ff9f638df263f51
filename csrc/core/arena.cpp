#include "core/arena.h"

#include "core/error.h"

#include <algorithm>
#include <cstring>

namespace offload {
namespace {

// Entries that an allocation looks at where it finds room without them: more than it adds, so that they don't pile up.
constexpr std::size_t kSomePending = 2;
// Likewise, where it finds only pageable memory, and would rather have what is locked.
constexpr std::size_t kManyPending = 64;
// Answers that are compared with; a set of tokens has about one for each stream.
constexpr std::size_t kMostAnswers = 8;

std::size_t roundUp(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

/// Asks tokens. A point of a stream that isn't reached says the same of all later ones, which are not asked then.
class Inquiry {
 public:
  explicit Inquiry(bool wait) : wait_(wait) {}

  bool done(const Token& token) {
    if (token.knownDone()) return true;
    auto reachedLater = [&](const Token& open) { return open.impliedBy(token); };
    if (std::any_of(open_.begin(), open_.end(), reachedLater)) return false;
    try {
      if (wait_) token.wait();
      if (token.done()) return true;
    } catch (...) {
      return false; // what the device can't tell is not reused
    }
    if (open_.size() < kMostAnswers) open_.push_back(token);
    return false;
  }

 private:
  const bool wait_;
  std::vector<Token> open_;
};

} // namespace

Arena::Arena(Link* link, ArenaOptions options)
    : link_(link),
      options_(std::move(options)),
      wanted_(link != nullptr && link->wantsRegistration() ? HostKind::Locked : HostKind::Pageable),
      slabs_(std::min(options_.slabBytes, options_.sharedRegionBytes / 16)),
      budget_(options_.pinnedLimit) {}

Arena::~Arena() {
  collect(Poll::Wait);
  trim();
  ArenaRanges::Regions used = ranges_.removeAll();
  if (!pending_.empty()) {
    // What the device can't tell to be done with is kept.
    for (const auto& region : used) region->memory.abandon();
    for (Pending& one : pending_) {
      if (one.owner) new std::shared_ptr<void>(std::move(one.owner));
    }
  } else {
    destroy(std::move(used));
  }
}

HostRange Arena::allocate(std::size_t bytes, bool locked) {
  const auto audited = audit("allocate");
  const std::size_t rounded = roundUp(std::clamp<std::size_t>(bytes, 1, PTRDIFF_MAX), ArenaSlabs::kGranule);
  collect(Poll::Some);
  const HostKind wanted = locked ? wanted_ : HostKind::Pageable;
  HostRange range = take(rounded, wanted);
  if (range.data == nullptr && wanted == HostKind::Locked && !mayLock(rounded)) {
    collect(Poll::Many);
    range = take(rounded, HostKind::Locked);
    // What has become unused makes way for what can be locked.
    if (range.data == nullptr && !mayLock(rounded)) range = take(rounded, HostKind::Pageable);
  }
  if (range.data == nullptr) {
    collect(Poll::All);
    range = grow(rounded, wanted);
  }
  // The system has no more to give: what is merely waiting for copies may do.
  if (range.data == nullptr && collect(Poll::Wait)) range = grow(rounded, wanted);
  if (range.data == nullptr && trim() > 0) range = grow(rounded, wanted);
  if (range.data == nullptr) {
    const ArenaStats now = stats();
    const std::size_t most = mostHeld();
    throw OutOfMemory(
        OutOfMemory::Where::Host, bytes,
        "offload: the host is out of memory. The system refused " + std::to_string(bytes) + " bytes; " +
            std::to_string(now.allocated) + " bytes are in use by offload tensors and " +
            std::to_string(now.reserved - now.allocated) + " are cached" +
            (most < SIZE_MAX ? ", and this machine or container has " + std::to_string(most) + ", swap included" : "") +
            ": free tensors, or use a machine with more memory.");
  }
  if (options_.poison) std::memset(range.data, 0xFF, rounded);
  range.bytes = bytes;
  return range;
}

HostRange Arena::take(std::size_t bytes, HostKind kind) {
  const Lock lock(mutex_);
  return carve(lock, bytes, kind);
}

HostRange Arena::carve(const Lock& /*lock*/, std::size_t bytes, HostKind kind) {
  const std::size_t slabBytes = slabs_.slabFor(bytes);
  HostAddress begin = slabBytes > 0 ? slabs_.take(bytes, kind) : 0;
  if (begin == 0 && slabBytes > 0) {
    if (const HostAddress slab = ranges_.take(slabBytes, kind); slab != 0) {
      slabs_.add(slab, bytes, kind);
      begin = slabs_.take(bytes, kind);
    }
  }
  // Where a slab has no room, a hole may have.
  if (begin == 0) begin = ranges_.take(bytes, kind);
  if (begin == 0) return {};
  stats_.allocated += bytes;
  stats_.allocatedPeak = std::max(stats_.allocatedPeak, stats_.allocated);
  ++stats_.count;
  ++stats_.allocations;
  mostHeld_ = std::max(mostHeld_, stats_.allocated + pendingBytes_);
  return {reinterpret_cast<void*>(begin), bytes, kind == HostKind::Locked};
}

std::size_t Arena::bytesOf(const Lock& /*lock*/, HostAddress range) const {
  const std::size_t small = slabs_.bytesOf(range);
  return small > 0 ? small : ranges_.bytesOf(range);
}

void Arena::giveBack(const Lock& /*lock*/, HostAddress range) {
  if (slabs_.bytesOf(range) > 0) range = slabs_.giveBack(range);
  if (range != 0) ranges_.giveBack(range);
}

void Arena::free(void* data, std::vector<Token> pending) noexcept {
  const auto audited = audit("free");
  const Lock lock(mutex_);
  const auto range = reinterpret_cast<HostAddress>(data);
  const std::size_t bytes = bytesOf(lock, range);
  stats_.allocated -= bytes;
  --stats_.count;
  std::erase_if(pending, [](const Token& token) { return token.knownDone(); });
  if (pending.empty()) {
    giveBack(lock, range);
  } else {
    pendingBytes_ += bytes;
    pending_.push_back({range, std::move(pending), nullptr});
  }
}

void Arena::keepAlive(std::shared_ptr<void> owner, std::vector<Token> pending) noexcept {
  const auto audited = audit("keepAlive");
  const Lock lock(mutex_);
  pending_.push_back({0, std::move(pending), std::move(owner)});
}

// Gives back pending ranges whose tokens are done: of the next few, of more, of all, or of all after waiting; whether there were any.
bool Arena::collect(Poll poll) {
  const std::size_t most = poll == Poll::Some ? kSomePending : poll == Poll::Many ? kManyPending : SIZE_MAX;
  std::vector<Pending> asked;
  {
    const Lock lock(mutex_);
    const std::size_t count = std::min(most, pending_.size());
    const auto end = pending_.begin() + static_cast<std::ptrdiff_t>(count);
    asked.assign(std::make_move_iterator(pending_.begin()), std::make_move_iterator(end));
    pending_.erase(pending_.begin(), end);
  }
  if (asked.empty()) return false;
  Inquiry inquiry(poll == Poll::Wait);
  const auto still = std::stable_partition(asked.begin(), asked.end(), [&](const Pending& one) {
    return std::all_of(one.tokens.begin(), one.tokens.end(), [&](const Token& token) { return inquiry.done(token); });
  });
  const Lock lock(mutex_);
  for (auto one = asked.begin(); one != still; ++one) {
    if (one->range == 0) continue;
    pendingBytes_ -= bytesOf(lock, one->range);
    giveBack(lock, one->range);
  }
  // To the end: one that is never done doesn't hide the others.
  pending_.insert(pending_.end(), std::make_move_iterator(still), std::make_move_iterator(asked.end()));
  return still != asked.begin();
}

std::size_t Arena::trim() {
  const auto audited = audit("trim");
  collect(Poll::All);
  {
    const Lock lock(mutex_);
    budget_.forget();
  }
  return release(SIZE_MAX, SIZE_MAX);
}

ArenaStats Arena::stats() const {
  const Lock lock(mutex_);
  ArenaStats stats = stats_;
  stats.reserved = ranges_.reserved();
  stats.pinned += ranges_.locked();
  return stats;
}

void Arena::resetPeaks() {
  const Lock lock(mutex_);
  stats_.allocatedPeak = stats_.allocated;
  stats_.reservedPeak = ranges_.reserved();
}

void Arena::resetEver() {
  const Lock lock(mutex_);
  stats_.reservedEver = ranges_.reserved();
}

void Arena::validate() const {
  const Lock lock(mutex_);
  auto require = [](bool holds, const char* what) {
    if (!holds) throw Error(std::string("offload: the Arena is inconsistent: ") + what);
  };
  const std::size_t used = ranges_.validate();
  slabs_.validate(ranges_);
  require(used == stats_.allocated + pendingBytes_ + slabs_.freeBytes(), "allocated bytes are miscounted");
  require(ranges_.locked() + stats_.pinned <= budget_.locked(), "more bytes are page-locked than the budget knows of");
  std::size_t pending = 0;
  for (const Pending& one : pending_) pending += one.range != 0 ? bytesOf(lock, one.range) : 0;
  require(pending <= pendingBytes_, "pending bytes are miscounted");
}

} // namespace offload
