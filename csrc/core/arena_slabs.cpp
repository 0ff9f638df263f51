#include "core/arena_slabs.h"

#include "core/error.h"

#include <algorithm>
#include <bit>
#include <iterator>

namespace offload {
namespace {

constexpr std::size_t kMostObjects = 64;
// With fewer a slab would be a detour.
constexpr std::size_t kFewestObjects = 4;

void require(bool holds, const char* what) {
  if (!holds) throw Error(std::string("offload: the Arena's slabs are inconsistent: ") + what);
}

} // namespace

std::size_t ArenaSlabs::slabFor(std::size_t bytes) const noexcept {
  const std::size_t objects = std::min(kMostObjects, slabBytes_ / bytes);
  return objects < kFewestObjects ? 0 : objects * bytes;
}

std::uint64_t ArenaSlabs::allFree(const Slab& slab) noexcept {
  return slab.objects == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << slab.objects) - 1;
}

HostAddress ArenaSlabs::take(std::size_t bytes, HostKind kind) {
  const auto open = open_.find({bytes, kind});
  if (open == open_.end()) return 0;
  const HostAddress begin = *open->second.begin();
  Slab& slab = slabs_.at(begin);
  const auto object = static_cast<std::size_t>(std::countr_zero(slab.free));
  slab.free &= slab.free - 1;
  freeBytes_ -= bytes;
  if (slab.free == 0) {
    open->second.erase(open->second.begin());
    if (open->second.empty()) open_.erase(open);
  }
  return begin + object * bytes;
}

void ArenaSlabs::add(HostAddress begin, std::size_t bytes, HostKind kind) {
  Slab slab{bytes, slabFor(bytes) / bytes, kind, 0};
  slab.free = allFree(slab);
  slabs_[begin] = slab;
  open_[{bytes, kind}].insert(begin);
  freeBytes_ += slab.objects * bytes;
}

ArenaSlabs::Slabs::const_iterator ArenaSlabs::slabOf(HostAddress object) const {
  const auto next = slabs_.upper_bound(object);
  if (next == slabs_.begin()) return slabs_.end();
  const auto slab = std::prev(next);
  return object < slab->first + slab->second.objects * slab->second.objectBytes ? slab : slabs_.end();
}

std::size_t ArenaSlabs::bytesOf(HostAddress object) const {
  const auto slab = slabOf(object);
  return slab == slabs_.end() ? 0 : slab->second.objectBytes;
}

HostAddress ArenaSlabs::giveBack(HostAddress object) {
  const HostAddress begin = slabOf(object)->first;
  Slab& slab = slabs_.at(begin);
  auto& open = open_[{slab.objectBytes, slab.kind}];
  open.insert(begin);
  slab.free |= std::uint64_t{1} << (object - begin) / slab.objectBytes;
  freeBytes_ += slab.objectBytes;
  if (slab.free != allFree(slab)) return 0;
  freeBytes_ -= slab.objects * slab.objectBytes;
  open.erase(begin);
  if (open.empty()) open_.erase({slab.objectBytes, slab.kind});
  slabs_.erase(begin);
  return begin;
}

std::vector<ArenaSlabs::Object> ArenaSlabs::objectsOf(HostAddress begin) const {
  std::vector<Object> objects;
  const auto found = slabs_.find(begin);
  if (found == slabs_.end()) return objects;
  const Slab& slab = found->second;
  for (std::size_t k = 0; k < slab.objects; ++k) {
    objects.push_back({begin + k * slab.objectBytes, slab.objectBytes, (slab.free >> k & 1) != 0});
  }
  return objects;
}

void ArenaSlabs::validate(const ArenaRanges& ranges) const {
  std::size_t freeBytes = 0;
  std::size_t open = 0;
  for (const auto& [begin, slab] : slabs_) {
    require(ranges.bytesOf(begin) == slab.objects * slab.objectBytes, "a slab doesn't fill its range");
    require(ranges.kindOf(begin) == slab.kind, "a slab is of another kind than its range");
    require((slab.free & ~allFree(slab)) == 0, "an object that there is not is free");
    require(slab.free != allFree(slab), "an empty slab was kept");
    freeBytes += static_cast<std::size_t>(std::popcount(slab.free)) * slab.objectBytes;
    const auto list = open_.find({slab.objectBytes, slab.kind});
    require(
        (slab.free != 0) == (list != open_.end() && list->second.contains(begin)), "a slab with free objects is not listed");
    if (slab.free != 0) ++open;
  }
  std::size_t listed = 0;
  for (const auto& [key, slabs] : open_) listed += slabs.size();
  require(listed == open, "a slab that is listed has no free object");
  require(freeBytes == freeBytes_, "free bytes are miscounted");
}

} // namespace offload
