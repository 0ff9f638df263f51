// Which accesses of the simulation nothing orders: vector clocks and a map of the last accesses to each byte range.
//
// Note [Order in the simulation]
// - Actors are the host (number 0; all its threads are one actor, so races among them are left to TSAN) and each stream.
// - Which accesses are ordered follows from the calls alone, not from the schedule: an operation is after the earlier ones of
//   its stream, after the events that the stream waits for, and after all that the host did or learned before it enqueued the
//   operation. So a race is found when its second access is enqueued, in the call that lacks the order, whatever the seed.
// - An operation can't be ordered before one that was enqueued earlier. So the order of the calls is a linear extension, and
//   the last write and the reads since then are all that a later access has to be compared with.
// - What the host is ordered after, every later operation is ordered after too, and it is forgotten.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/link/link.h"
#include "core/link/sim_memory.h"

namespace offload {

using Actor = std::size_t;
inline constexpr Actor hostActor = 0;

/// For each actor, the time up to which it has been seen.
class VectorClock {
 public:
  std::uint64_t operator[](Actor actor) const {
    return actor < times_.size() ? times_[actor] : 0;
  }
  std::uint64_t tick(Actor actor);
  void join(const VectorClock& other);

 private:
  std::vector<std::uint64_t> times_;
};

/// One thing that an actor does, and its place in the order.
struct Action {
  const char* kind;
  std::uint64_t sequence;
  Actor actor;
  std::uint64_t time;
  VectorClock clock;

  bool before(const Action& other) const {
    return other.clock[actor] >= time;
  }
};
using ActionPtr = std::shared_ptr<const Action>;

/// The earlier of two accesses that nothing orders.
struct Race {
  ActionPtr action;
  MemoryRange range;
  Access access;
};

class RaceDetector {
 public:
  explicit RaceDetector(bool enabled) : enabled_(enabled), clocks_(1) {}

  Actor addActor();
  /// The next action of `actor`. A stream's action is after all that the host did and learned so far.
  ActionPtr act(Actor actor, const char* kind);
  /// The next `count` actions of a stream, none of which is after another.
  std::vector<ActionPtr> actAtOnce(Actor actor, const char* kind, std::size_t count);
  const VectorClock& clock(Actor actor) const {
    return clocks_[actor];
  }
  /// What `actor` does from now on is after `seen`.
  void join(Actor actor, const VectorClock& seen);

  std::optional<Race> find(const Action& action, MemoryRange range, Access access) const;
  void remember(const ActionPtr& action, MemoryRange range, Access access);
  void forget(MemoryRange range);

  std::size_t rangesRemembered() const {
    return segments_.size();
  }

 private:
  struct Touch {
    ActionPtr action;
    MemoryRange range;
  };
  struct Segment {
    std::uintptr_t end = 0;
    Touch write;
    std::vector<Touch> reads;
  };
  using Segments = std::map<std::uintptr_t, Segment>;

  Segments::iterator split(std::uintptr_t at);
  bool hostKnows(const Touch& touch) const;
  void sweep();

  bool enabled_;
  std::uint64_t sequence_ = 0;
  std::vector<VectorClock> clocks_;
  Segments segments_; // disjoint, by their first byte
  std::size_t sweepAt_ = 64;
};

} // namespace offload
