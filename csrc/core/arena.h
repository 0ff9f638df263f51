// The caching host allocator that Blocks come from.
//
// Note [Arena]
// Host memory comes from the system in regions. A large request that no free range fits gets a region of its own size, exact to the
// page; small ones share a region. A region is page-locked where the Link wants that, and stays so while it is cached. Ranges split and coalesce within
// their region; the best fit wins. A range that a copy still reads or writes is *pending*: it is not handed out before its tokens
// are done. free() is called from deleters: it neither waits nor calls the Link.
#pragma once

#include "core/token.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace offload {

struct HostRange {
  void* data = nullptr;
  std::size_t bytes = 0;
  bool pinned = false;
};

struct ArenaOptions {
  /// Bytes of a region that small requests share.
  std::size_t sharedRegionBytes = std::size_t{32} << 20;
  /// Bytes from which on a request gets a region of its own.
  std::size_t ownRegionBytes = std::size_t{8} << 20;
  /// Bytes that may be page-locked; past it memory is pageable.
  std::size_t pinnedLimit = SIZE_MAX;
  /// Fills every range with 0xFF before handing it out, so that a read of bytes that nobody wrote shows as NaN.
  bool poison = false;
  /// Called with one sentence when memory can't be page-locked; at most once.
  std::function<void(const std::string&)> warn;
};

struct ArenaStats {
  std::size_t allocated = 0; // bytes handed out
  std::size_t allocatedPeak = 0;
  std::size_t reserved = 0; // bytes held from the system
  std::size_t reservedPeak = 0;
  std::size_t pinned = 0; // bytes of reserved that are page-locked
  std::size_t count = 0; // ranges handed out
  std::size_t allocations = 0; // ranges ever handed out
};

class Arena {
 public:
  /// `link` may be null: nothing is page-locked then. It must outlive the Arena.
  explicit Arena(Link* link, ArenaOptions options = {});
  /// Waits for what is pending.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// At least `bytes` bytes, aligned to 512. Throws OutOfMemory. May wait for pending ranges when the system refuses more.
  HostRange allocate(std::size_t bytes);
  /// Takes a range of allocate() back; it is reused after all of `pending` is done.
  void free(void* data, std::vector<Token> pending) noexcept;
  /// Holds memory of somebody else until all of `pending` is done. Never waits.
  void keepAlive(std::shared_ptr<void> owner, std::vector<Token> pending) noexcept;
  /// Returns regions that nothing uses to the system; its bytes.
  std::size_t trim();

  ArenaStats stats() const;
  void resetPeaks();
  /// Checks every invariant; throws Error with what is broken.
  void validate() const;

 private:
  struct Region;
  struct Pending {
    void* data; // a range of ours, or null where `owner` holds other memory
    std::vector<Token> tokens;
    std::shared_ptr<void> owner;
  };
  using Address = std::uintptr_t;

  Region& regionOf(const void* data);
  HostRange take(std::size_t bytes);
  HostRange carve(Region& region, Address begin, std::size_t free, std::size_t bytes);
  void giveBack(void* data);
  void insertFree(Region& region, Address begin, std::size_t bytes);
  bool collect(bool wait);
  std::unique_ptr<Region> newRegion(std::size_t bytes);
  void destroy(Region& region) noexcept;

  Link* const link_;
  const ArenaOptions options_;
  mutable std::mutex mutex_;
  std::map<Address, std::unique_ptr<Region>> regions_; // by begin
  std::set<std::pair<std::size_t, Address>> freeBySize_;
  std::vector<Pending> pending_;
  std::size_t pendingBytes_ = 0; // of ranges that are pending, also while a thread asks their tokens
  ArenaStats stats_;
  bool warned_ = false;
};

} // namespace offload
