#include "core/link/sim_races.h"

#include <algorithm>

namespace offload {

namespace {

bool unordered(const ActionPtr& earlier, const Action& action) {
  return earlier != nullptr && !earlier->before(action);
}

} // namespace

std::uint64_t VectorClock::tick(Actor actor) {
  if (times_.size() <= actor) {
    times_.resize(actor + 1);
  }
  return ++times_[actor];
}

void VectorClock::join(const VectorClock& other) {
  if (times_.size() < other.times_.size()) {
    times_.resize(other.times_.size());
  }
  for (std::size_t i = 0; i < other.times_.size(); ++i) {
    times_[i] = std::max(times_[i], other.times_[i]);
  }
}

Actor RaceDetector::addActor() {
  clocks_.emplace_back();
  return clocks_.size() - 1;
}

ActionPtr RaceDetector::act(Actor actor, const char* kind) {
  auto action = std::make_shared<Action>(Action{kind, ++sequence_, actor, 0, {}});
  if (enabled_) {
    clocks_[actor].join(clocks_[hostActor]);
    action->time = clocks_[actor].tick(actor);
    action->clock = clocks_[actor];
  }
  return action;
}

std::vector<ActionPtr> RaceDetector::actAtOnce(Actor actor, const char* kind, std::size_t count) {
  const VectorClock before = act(actor, kind)->clock;
  std::vector<ActionPtr> actions;
  for (std::size_t i = 0; i < count; ++i) {
    actions.push_back(std::make_shared<Action>(Action{kind, ++sequence_, actor, clocks_[actor].tick(actor), before}));
  }
  return actions;
}

void RaceDetector::join(Actor actor, const VectorClock& seen) {
  clocks_[actor].join(seen);
}

std::optional<Race> RaceDetector::find(const Action& action, MemoryRange range, Access access) const {
  if (!enabled_ || range.bytes == 0) {
    return std::nullopt;
  }
  auto at = segments_.upper_bound(range.begin());
  if (at != segments_.begin() && std::prev(at)->second.end > range.begin()) {
    --at;
  }
  for (; at != segments_.end() && at->first < range.end(); ++at) {
    const Segment& segment = at->second;
    if (unordered(segment.write.action, action)) {
      return Race{segment.write.action, segment.write.range, Access::Write};
    }
    if (access == Access::Read) {
      continue;
    }
    for (const Touch& read : segment.reads) {
      if (unordered(read.action, action)) {
        return Race{read.action, read.range, Access::Read};
      }
    }
  }
  return std::nullopt;
}

void RaceDetector::remember(const ActionPtr& action, MemoryRange range, Access access) {
  if (!enabled_ || range.bytes == 0) {
    return;
  }
  if (action->actor == hostActor) {
    if (access == Access::Write) {
      forget(range);
    }
    return;
  }
  auto at = split(range.begin());
  split(range.end());
  for (std::uintptr_t cursor = range.begin(); cursor < range.end(); cursor = at->second.end, ++at) {
    if (at == segments_.end() || at->first > cursor) {
      const std::uintptr_t end = at == segments_.end() ? range.end() : std::min(at->first, range.end());
      at = segments_.emplace_hint(at, cursor, Segment{end, {}, {}});
    }
    Segment& segment = at->second;
    if (access == Access::Read) {
      // Whatever is ordered after this read is ordered after the reads before it too.
      std::erase_if(segment.reads, [&](const Touch& read) { return read.action->before(*action); });
      segment.reads.push_back({action, range});
    } else {
      segment.write = {action, range};
      segment.reads.clear();
    }
    // Pieces that one write has made alike become one again.
    if (cursor != range.begin()) {
      auto left = std::prev(at);
      if (left->second.write.action == segment.write.action && left->second.reads.empty() && segment.reads.empty()) {
        left->second.end = segment.end;
        segments_.erase(at);
        at = left;
      }
    }
  }
  if (segments_.size() > sweepAt_) {
    sweep();
  }
}

void RaceDetector::forget(MemoryRange range) {
  if (!enabled_ || range.bytes == 0 || segments_.empty()) {
    return;
  }
  const auto first = split(range.begin());
  segments_.erase(first, split(range.end()));
}

/// Makes `at` a border between segments. Returns the first segment that does not begin before it.
RaceDetector::Segments::iterator RaceDetector::split(std::uintptr_t at) {
  auto next = segments_.lower_bound(at);
  if (next == segments_.begin()) {
    return next;
  }
  Segment& left = std::prev(next)->second;
  if (left.end <= at) {
    return next;
  }
  Segment right = left;
  left.end = at;
  return segments_.emplace_hint(next, at, std::move(right));
}

bool RaceDetector::hostKnows(const Touch& touch) const {
  return clocks_[hostActor][touch.action->actor] >= touch.action->time;
}

void RaceDetector::sweep() {
  for (auto at = segments_.begin(); at != segments_.end();) {
    Segment& segment = at->second;
    if (segment.write.action != nullptr && hostKnows(segment.write)) {
      segment.write = {};
    }
    std::erase_if(segment.reads, [&](const Touch& read) { return hostKnows(read); });
    const bool empty = segment.write.action == nullptr && segment.reads.empty();
    at = empty ? segments_.erase(at) : std::next(at);
  }
  sweepAt_ = std::max<std::size_t>(64, 2 * segments_.size());
}

} // namespace offload
