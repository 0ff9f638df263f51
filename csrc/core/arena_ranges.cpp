#include "core/arena_ranges.h"

#include "core/error.h"

#include <iterator>

namespace offload {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw Error(std::string("offload: the Arena is inconsistent: ") + what);
}

} // namespace

void ArenaRanges::add(std::unique_ptr<ArenaRegion> region) {
  ArenaRegion& placed = *(regions_[region->begin()] = std::move(region));
  bytes_[index(placed.kind)] += placed.memory.bytes();
  unused_[index(placed.kind)] += placed.memory.bytes();
  insertFree(placed, placed.begin(), placed.memory.bytes());
}

ArenaRegion& ArenaRanges::regionOf(HostAddress address) const {
  return *std::prev(regions_.upper_bound(address))->second;
}

HostKind ArenaRanges::kindOf(HostAddress address) const {
  return regionOf(address).kind;
}

std::size_t ArenaRanges::bytesOf(HostAddress begin) const {
  return regionOf(begin).used.at(begin);
}

HostAddress ArenaRanges::take(std::size_t bytes, HostKind kind) {
  auto& bySize = freeBySize_[index(kind)];
  const auto fit = bySize.lower_bound({bytes, 0});
  if (fit == bySize.end()) return 0;
  const auto [free, begin] = *fit;
  ArenaRegion& region = regionOf(begin);
  eraseFree(region, region.free.find(begin));
  if (region.used.empty()) unused_[index(kind)] -= region.memory.bytes();
  region.used[begin] = bytes;
  if (free > bytes) insertFree(region, begin + bytes, free - bytes);
  return begin;
}

void ArenaRanges::giveBack(HostAddress begin) {
  ArenaRegion& region = regionOf(begin);
  const auto used = region.used.find(begin);
  std::size_t bytes = used->second;
  region.used.erase(used);
  if (region.used.empty()) unused_[index(region.kind)] += region.memory.bytes();
  const auto next = region.free.lower_bound(begin);
  if (next != region.free.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      bytes += previous->second;
      eraseFree(region, previous);
    }
  }
  if (next != region.free.end() && begin + bytes == next->first) {
    bytes += next->second;
    eraseFree(region, next);
  }
  insertFree(region, begin, bytes);
}

void ArenaRanges::insertFree(ArenaRegion& region, HostAddress begin, std::size_t bytes) {
  region.free[begin] = bytes;
  freeBySize_[index(region.kind)].insert({bytes, begin});
}

void ArenaRanges::eraseFree(ArenaRegion& region, std::map<HostAddress, std::size_t>::iterator range) {
  freeBySize_[index(region.kind)].erase({range->second, range->first});
  region.free.erase(range);
}

void ArenaRanges::removeUnused(std::size_t bytes, HostKind kind, Regions& removed) {
  std::size_t found = 0;
  for (auto it = regions_.begin(); found < bytes && unused(kind) > 0;) {
    ArenaRegion& region = *it->second;
    if (region.kind != kind || !region.used.empty()) {
      ++it;
      continue;
    }
    eraseFree(region, region.free.begin());
    found += region.memory.bytes();
    bytes_[index(kind)] -= region.memory.bytes();
    unused_[index(kind)] -= region.memory.bytes();
    removed.push_back(std::move(it->second));
    it = regions_.erase(it);
  }
}

ArenaRanges::Regions ArenaRanges::removeAll() {
  Regions removed;
  for (auto& [begin, region] : regions_) removed.push_back(std::move(region));
  *this = {};
  return removed;
}

std::size_t ArenaRanges::validate(const ArenaRegion& region) const {
  std::map<HostAddress, std::size_t> all = region.used;
  std::size_t used = 0;
  for (const auto& [at, bytes] : region.used) used += bytes;
  for (const auto& [at, bytes] : region.free) {
    require(all.emplace(at, bytes).second, "a range is both free and used");
    require(freeBySize_[index(region.kind)].contains({bytes, at}), "a free range is not listed by size");
    require(!region.free.contains(at + bytes), "two free neighbours are not coalesced");
  }
  HostAddress at = region.begin();
  for (const auto& [start, bytes] : all) {
    require(start == at, "ranges overlap or leave a gap");
    at += bytes;
  }
  require(at == region.begin() + region.memory.bytes(), "ranges don't fill their region");
  return used;
}

std::size_t ArenaRanges::validate() const {
  std::array<std::size_t, 2> bytes{};
  std::array<std::size_t, 2> unused{};
  std::size_t used = 0;
  std::size_t freeRanges = 0;
  for (const auto& [begin, region] : regions_) {
    bytes[index(region->kind)] += region->memory.bytes();
    if (region->used.empty()) unused[index(region->kind)] += region->memory.bytes();
    freeRanges += region->free.size();
    used += validate(*region);
  }
  require(freeRanges == freeBySize_[0].size() + freeBySize_[1].size(), "a range listed by size is not free");
  require(bytes == bytes_, "reserved bytes are miscounted");
  require(unused == unused_, "unused bytes are miscounted");
  return used;
}

} // namespace offload
