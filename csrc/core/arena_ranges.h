// The ranges of an Arena's regions: which are free, and which of them fits best.
#pragma once

#include "core/host_region.h"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

namespace offload {

using HostAddress = std::uintptr_t;

/// What memory is: page-locked, or pageable.
enum class HostKind : std::uint8_t { Locked, Pageable };

struct ArenaRegion {
  HostAddress begin() const noexcept {
    return reinterpret_cast<HostAddress>(memory.data());
  }

  HostRegion memory;
  HostKind kind = HostKind::Pageable;
  std::map<HostAddress, std::size_t> free; // by begin; neighbours are coalesced
  std::map<HostAddress, std::size_t> used;
};

/// Guarded by the Arena's mutex. An address of 0 means none.
class ArenaRanges {
 public:
  using Regions = std::vector<std::unique_ptr<ArenaRegion>>;

  void add(std::unique_ptr<ArenaRegion> region);
  /// The smallest free range of this kind that has `bytes`, or the front of it.
  HostAddress take(std::size_t bytes, HostKind kind);
  void giveBack(HostAddress begin);

  HostKind kindOf(HostAddress address) const;
  /// Of a range that take() returned.
  std::size_t bytesOf(HostAddress begin) const;
  /// Bytes of regions of this kind that nothing uses.
  std::size_t unused(HostKind kind) const noexcept {
    return unused_[index(kind)];
  }
  /// Removes regions of this kind that nothing uses: as many as it takes for `bytes`, or all.
  void removeUnused(std::size_t bytes, HostKind kind, Regions& removed);
  Regions removeAll();

  /// Bytes of all regions, or of those that are page-locked.
  std::size_t reserved() const noexcept {
    return bytes_[0] + bytes_[1];
  }
  std::size_t locked() const noexcept {
    return bytes_[index(HostKind::Locked)];
  }
  /// By begin.
  const std::map<HostAddress, std::unique_ptr<ArenaRegion>>& regions() const noexcept {
    return regions_;
  }
  /// Checks every invariant; throws Error. Returns the bytes of ranges taken.
  std::size_t validate() const;

 private:
  static std::size_t index(HostKind kind) noexcept {
    return static_cast<std::size_t>(kind);
  }
  ArenaRegion& regionOf(HostAddress address) const;
  void insertFree(ArenaRegion& region, HostAddress begin, std::size_t bytes);
  void eraseFree(ArenaRegion& region, std::map<HostAddress, std::size_t>::iterator range);
  std::size_t validate(const ArenaRegion& region) const;

  std::map<HostAddress, std::unique_ptr<ArenaRegion>> regions_; // by begin
  std::array<std::set<std::pair<std::size_t, HostAddress>>, 2> freeBySize_; // by kind
  std::array<std::size_t, 2> bytes_{}; // of regions, by kind
  std::array<std::size_t, 2> unused_{}; // of those that nothing uses
};

} // namespace offload
