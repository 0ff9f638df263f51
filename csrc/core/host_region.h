// Host memory straight from the system.
//
// Note [Host regions]
// A region is anonymous memory of whole pages. Where it spans an aligned 2 MiB it asks for a huge page there: fewer faults, fewer
// entries in the page tables, and fewer pages for whoever page-locks them. The rest has small pages, so no region is larger than was
// asked for. Memory is lazy: a page is zeroed at its first touch, one thread at a few GB/s, which is most of what page-locking
// costs. populate() does that ahead, on several threads.
//
// A page goes to the memory node of the CPU that touches it first, unless the process has a policy of its own (numactl). So the
// threads of populate() keep to the node of their caller: what a thread asks for is near that thread, as it is with cudaHostAlloc,
// and a process that is bound to the CPUs beside its GPU has its memory there. A node that is full passes pages on to the others by
// itself. No policy is set on the region (mbind): containers forbid that by default, and it would override numactl's.
#pragma once

#include <cstddef>

namespace offload {

/// `bytes` in whole pages.
std::size_t wholePages(std::size_t bytes);

class HostRegion {
 public:
  HostRegion() = default;
  /// Asks for whole pages; empty if the system refuses.
  static HostRegion map(std::size_t bytes);
  ~HostRegion();
  HostRegion(HostRegion&& other) noexcept;
  HostRegion& operator=(HostRegion&& other) noexcept;

  explicit operator bool() const noexcept {
    return data_ != nullptr;
  }
  char* data() const noexcept {
    return data_;
  }
  std::size_t bytes() const noexcept {
    return bytes_;
  }

  /// Touches every page on up to `most` threads. False if the system has no memory for some of them.
  bool populate(std::size_t most = kMostThreads) const;
  /// Keeps the region out of forked children: a fork would copy every page-locked page on the spot.
  void hideFromChildren() const;

  /// Leaves the memory as it is for good.
  void abandon() noexcept {
    data_ = nullptr;
  }

  static constexpr std::size_t kMostThreads = 16;

 private:
  HostRegion(char* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

} // namespace offload
