// How many bytes an Arena may page-lock, and how many it may hold at all.
//
// Note [Page-locked bytes]
// Page-locked memory can be neither swapped nor reclaimed, so too much of it gets a process, or a neighbour, killed. Four bounds
// hold, each of them on the sum, so that a request which is too large leaves the room to those that follow:
//   - the setting ArenaOptions::pinnedLimit;
//   - 85 % of the machine's memory, or of the container's limit where that is less;
//   - what is available of that at present, less 5 % for everybody else;
//   - what the driver refused: less than the sum that it would have made, until the next trim().
// What is available counts the Arena's own bytes as taken from the moment that they have pages. Those that are still getting them, or
// giving them up, while the system is asked (threads grow at once, and seconds pass over gigabytes) are in what it says, or are not:
// they are taken to be in it.
//
// RLIMIT_MEMLOCK is not among them. It is for mlock(); NVIDIA's driver pins pages on its own account. Where a driver does count them
// (or has limits of its own, as on WSL), it refuses, and that is the fourth bound.
//
// Pageable memory gets its pages when it is touched, and the kernel refuses none: it takes memory until it has to kill somebody. So the
// Arena holds no more than there is, swap included, of all kinds together.
#pragma once

#include "core/memory_limits.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace offload {

/// Guarded by the Arena's mutex.
class ArenaBudget {
 public:
  explicit ArenaBudget(std::size_t setting) : setting_(setting) {}

  /// Whether to ask the system anew what there is. That reads files, so it is done without the mutex, and not at every turn.
  bool stale() const;
  /// Asked before the system is, and given to refresh() with what that says.
  struct Before {
    std::size_t settled = 0;
    std::uint64_t left = 0;
  };
  Before before() const {
    return {locked_ - unsettled_, left_};
  }
  void refresh(const MemoryLimits& memory, Before before);

  /// Bytes that may be locked now.
  std::size_t room() const;
  /// `bytes` get pages, and are locked; then they have them.
  void add(std::size_t bytes);
  void settle(std::size_t bytes);
  /// They are about to be unlocked and to give up their pages; then they have.
  void leave(std::size_t bytes);
  void remove(std::size_t bytes);
  /// Bytes that are locked, or are being locked or unlocked.
  std::size_t locked() const noexcept {
    return locked_;
  }

  /// The driver refused to lock `bytes` that had been added, and have been removed.
  void refuse(std::size_t bytes);
  /// Memory is about to be given back: what was found out before no longer holds.
  void forget();
  /// One sentence: why `bytes` can't be locked now, and what to do.
  std::string refusal(std::size_t bytes) const;
  /// The most bytes that may be held from the system.
  std::size_t most() const;

 private:
  enum class Bound { Setting, Total, Available, Driver };
  std::size_t room(Bound bound) const;

  const std::size_t setting_;
  MemoryLimits memory_;
  std::optional<std::chrono::steady_clock::time_point> read_; // when memory_ was
  std::size_t locked_ = 0;
  std::size_t unsettled_ = 0; // of these, what is getting its pages, or giving them up
  std::uint64_t left_ = 0; // bytes that ever began to give them up
  std::size_t lockedThen_ = 0; // of what memory_ says is available, certainly not among it
  std::size_t refused_ = SIZE_MAX; // a sum that the driver refused
};

} // namespace offload
