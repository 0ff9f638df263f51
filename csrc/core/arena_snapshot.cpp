#include "core/arena_snapshot.h"

#include "core/arena.h"

#include <algorithm>
#include <unordered_set>

namespace offload {

std::vector<ArenaSegment> Arena::snapshot() const {
  using State = ArenaPiece::State;
  const Lock lock(mutex_);
  std::unordered_set<HostAddress> pending;
  for (const Pending& one : pending_) pending.insert(one.range);
  auto stateOf = [&pending](HostAddress begin) { return pending.contains(begin) ? State::Pending : State::Allocated; };
  std::vector<ArenaSegment> segments;
  for (const auto& [begin, region] : ranges_.regions()) {
    ArenaSegment& segment = segments.emplace_back(ArenaSegment{begin, region->memory.bytes(), region->kind, {}});
    for (const auto& [at, bytes] : region->free) segment.pieces.push_back({at, bytes, State::Free});
    for (const auto& [at, bytes] : region->used) {
      const auto objects = slabs_.objectsOf(at);
      if (objects.empty()) segment.pieces.push_back({at, bytes, stateOf(at)});
      for (const auto& object : objects) {
        segment.pieces.push_back({object.begin, object.bytes, object.free ? State::Free : stateOf(object.begin)});
      }
    }
    std::sort(segment.pieces.begin(), segment.pieces.end(), [](const ArenaPiece& a, const ArenaPiece& b) {
      return a.begin < b.begin;
    });
  }
  return segments;
}

} // namespace offload
