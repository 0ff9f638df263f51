// Small ranges, cut from slabs of equal ones.
//
// Note [Slabs]
// A slab is a range of ArenaRanges that holds up to 64 objects of one size, so small tensors that come and go leave no holes
// between large ones, and cost a bit instead of four tree nodes. There is a size for every multiple of the granule: an object has no
// more bytes than were asked for, rounded to the granule, and a size that nobody uses costs nothing. An object comes from the lowest
// slab that has one, so that the upper ones empty, and an empty slab goes back at once.
#pragma once

#include "core/arena_ranges.h"

namespace offload {

/// Guarded by the Arena's mutex. An address of 0 means none.
class ArenaSlabs {
 public:
  static constexpr std::size_t kGranule = 512;

  /// `slabBytes`: the most that a slab has.
  explicit ArenaSlabs(std::size_t slabBytes) : slabBytes_(slabBytes) {}

  /// Bytes of the slab that objects of `bytes`, a multiple of the granule, come from; 0 where they are too large for slabs.
  std::size_t slabFor(std::size_t bytes) const noexcept;
  /// A free object of these bytes.
  HostAddress take(std::size_t bytes, HostKind kind);
  /// A range of slabFor(bytes) bytes becomes a slab.
  void add(HostAddress slab, std::size_t bytes, HostKind kind);
  /// Bytes of the object at this address; 0 where it is none of a slab.
  std::size_t bytesOf(HostAddress object) const;
  /// The slab, if it is empty now; it is none any more then.
  HostAddress giveBack(HostAddress object);

  struct Object {
    HostAddress begin;
    std::size_t bytes;
    bool free;
  };
  /// The objects of the slab that begins here, in order; none where no slab does.
  std::vector<Object> objectsOf(HostAddress slab) const;

  /// Bytes of free objects.
  std::size_t freeBytes() const noexcept {
    return freeBytes_;
  }
  /// Checks every invariant; throws Error.
  void validate(const ArenaRanges& ranges) const;

 private:
  struct Slab {
    std::size_t objectBytes = 0;
    std::size_t objects = 0;
    HostKind kind = HostKind::Pageable;
    std::uint64_t free = 0; // a bit for each object
  };
  using Slabs = std::map<HostAddress, Slab>;
  using Key = std::pair<std::size_t, HostKind>;

  Slabs::const_iterator slabOf(HostAddress object) const;
  static std::uint64_t allFree(const Slab& slab) noexcept;

  const std::size_t slabBytes_;
  Slabs slabs_; // by begin
  std::map<Key, std::set<HostAddress>> open_; // slabs with free objects, by the bytes and kind of these
  std::size_t freeBytes_ = 0;
};

} // namespace offload
