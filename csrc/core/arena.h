// The caching host allocator that Blocks come from.
//
// Note [Arena]
// Host memory comes from the system in regions, which are page-locked where the Link wants that, and stay so while they are cached.
// Each is locked in one call and no range crosses two of them: CUDA refuses to copy what is locked only in part. A large request that
// no free range fits gets a region of its own, exact to the page; others share regions, small ones by slabs (arena_slabs.h). Ranges
// split and coalesce within their region; the best fit wins, and page-locked memory comes before pageable.
//
// A range that a copy still reads or writes is *pending*: it is not handed out before its tokens are done. They are asked a few at a
// time, more where only pageable memory is left, and all of them before the system is asked for any. free() is called from deleters:
// it neither waits nor calls the Link.
//
// One mutex guards everything. No call to the Link or the system is made under it: threads go on while one of them locks gigabytes.
#pragma once

#include "core/arena_budget.h"
#include "core/arena_ranges.h"
#include "core/arena_slabs.h"
#include "core/arena_snapshot.h"
#include "core/audit.h"
#include "core/fork_mutex.h"
#include "core/shared_memory.h"
#include "core/token.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

namespace offload {

struct HostRange {
  void* data = nullptr;
  std::size_t bytes = 0;
  bool pinned = false;
};

struct ArenaOptions {
  /// Bytes of a region that requests share, at most. While the Arena is small they are fewer, so that little is left over.
  std::size_t sharedRegionBytes = std::size_t{32} << 20;
  /// Bytes from which on a request always gets a region of its own.
  std::size_t ownRegionBytes = std::size_t{8} << 20;
  /// Bytes of a slab, at most; a sixteenth of sharedRegionBytes if that is less.
  std::size_t slabBytes = std::size_t{64} << 10;
  /// Bytes that may be page-locked; past it memory is pageable. The system may allow less: arena_budget.h.
  std::size_t pinnedLimit = SIZE_MAX;
  /// Touches all pages ahead of page-locking them, on several threads. Without it the driver does, on one.
  bool prefault = true;
  /// Fills every range with 0xFF before handing it out, so that a read of bytes that nobody wrote shows as NaN.
  bool poison = false;
  /// Checks every invariant after every public call, and ends the process where one is broken.
  bool validate = false;
  /// Called with one sentence when memory can't be page-locked; at most once.
  std::function<void(const std::string&)> warn;
  /// What memory there is, in place of readMemoryLimits().
  std::function<MemoryLimits()> memoryLimits;
};

struct ArenaStats {
  std::size_t allocated = 0; // bytes handed out
  std::size_t allocatedPeak = 0;
  std::size_t reserved = 0; // bytes held from the system
  std::size_t reservedPeak = 0;
  std::size_t reservedEver = 0; // bytes that the system has given
  std::size_t pinned = 0; // bytes of reserved and of shared that are page-locked
  std::size_t shared = 0; // bytes of shared memory that this process has mapped, beside what is reserved
  std::size_t count = 0; // ranges handed out
  std::size_t allocations = 0; // ranges ever handed out
};

class Arena {
 public:
  /// `link` may be null: nothing is page-locked then. It must outlive the Arena.
  explicit Arena(Link* link, ArenaOptions options = {});
  /// Waits for what is pending. Memory that the device can't tell about is kept.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// At least `bytes` bytes, aligned to 512. Throws OutOfMemory. May wait for pending ranges when the system refuses more. With
  /// `locked`, page-locked memory if there may be more of it.
  HostRange allocate(std::size_t bytes, bool locked = true);
  /// Takes a range of allocate() back; it is reused after all of `pending` is done.
  void free(void* data, std::vector<Token> pending) noexcept;
  /// Holds memory of somebody else until all of `pending` is done. Never waits.
  void keepAlive(std::shared_ptr<void> owner, std::vector<Token> pending) noexcept;

  /// Memory for a storage that other processes may open, and what another process has made: see SharedMemory, also for what they
  /// throw. It counts as page-locked memory does, and is pageable past the same limits. Whoever lets go of page-locked memory in
  /// a deleter gives it to keepAlive(): to unlock it takes a call of the Link.
  std::shared_ptr<SharedMemory> share(std::size_t bytes, Born born);
  /// See SharedMemory; what was given to keepAlive() makes way. May wait for copies.
  void requireDescriptor();
  std::shared_ptr<SharedMemory> openShared(int descriptor);
  /// Returns regions that nothing uses to the system; its bytes.
  std::size_t trim();

  ArenaStats stats() const;
  void resetPeaks();
  void resetEver();
  /// By address. A range that another thread is just taking back may still count as allocated.
  std::vector<ArenaSegment> snapshot() const;
  /// Checks every invariant; throws Error with what is broken.
  void validate() const;

 private:
  using Lock = std::lock_guard<ForkMutex>;
  using RegionPtr = std::unique_ptr<ArenaRegion>;
  enum class Poll { Some, Many, All, Wait };
  struct Pending {
    HostAddress range; // ours, or 0 where `owner` holds other memory
    std::vector<Token> tokens;
    std::shared_ptr<void> owner;
  };

  auto audit(const char* call) const {
    return Audit(options_.validate, call, [this] { validate(); });
  }
  HostRange take(std::size_t bytes, HostKind kind);
  HostRange carve(const Lock&, std::size_t bytes, HostKind kind);
  std::size_t bytesOf(const Lock&, HostAddress range) const;
  void giveBack(const Lock&, HostAddress range);
  bool collect(Poll poll);

  HostRange grow(std::size_t bytes, HostKind wanted);
  HostRange place(RegionPtr region, std::size_t bytes);
  RegionPtr lockedRegion(std::size_t bytes);
  std::size_t grant(std::size_t bytes, bool exact);
  bool mayLock(std::size_t bytes);
  std::size_t mostHeld();
  std::size_t leastRegion(std::size_t bytes) const;
  std::size_t regionFor(const Lock&, std::size_t bytes) const;
  std::shared_ptr<SharedMemory> mapped(std::unique_ptr<SharedMemory> memory);
  bool lockShared(const SharedMemory& memory);
  void unmap(SharedMemory* memory) noexcept;
  void warn(std::size_t bytes);
  void trimExcess(std::size_t bytes);
  std::size_t release(std::size_t pageable, std::size_t locked);
  std::size_t destroy(ArenaRanges::Regions regions) noexcept;
  void look();

  Link* const link_;
  const ArenaOptions options_;
  const HostKind wanted_; // what memory is to be
  mutable ForkMutex mutex_{ForkRank::Arena};
  ArenaRanges ranges_;
  ArenaSlabs slabs_;
  ArenaBudget budget_;
  std::deque<Pending> pending_;
  std::size_t pendingBytes_ = 0; // of ranges that are pending, also while a thread asks their tokens
  std::size_t mostHeld_ = 0; // the peak of bytes handed out or pending
  ArenaStats stats_; // without reserved, and with the pinned bytes of shared memory alone
  bool warned_ = false;
};

} // namespace offload
