// The recorded order of fetches, what of it is worth keeping on the device, and what comes next (forecast.h).
//
// Note [What is kept]
// A model asks for its weights in the same order again and again. Of such a cycle no cache saves more bytes than a fixed set: the
// least recently used one is just the one that comes next. Spread evenly over the order, the set also leaves the link some work
// between any two stretches of compute. So a *pass*, fetches until one repeats, is recorded; at its end every extent is told
// whether it stays, small ones first. Forward and backward are two passes of opposite order; the longer one makes the
// plan, and keeps it while no extent is new. An extent that no plan knows yet stays if there is room, which fills an empty budget
// within the first pass. What was born on the device is mostly an activation, used a few times and gone: it counts after sixteen
// fetches only.
//
// A model that is not used any more, a text encoder beside the denoiser that runs fifty steps after it, would keep its share for as
// long as it lives. Passes can't tell: a recurrent layer makes many of them within a step. Bytes can: within one cycle no more are
// copied for want of room than the plan has, so an extent that was not asked for while twice as many were leaves the plan. What has
// room for all of it loses nothing.
#pragma once

#include "core/extent.h"
#include "core/forecast.h"
#include "core/guests.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

namespace offload {

struct Block;

/// Of one device; guarded by Residency.
class Schedule {
 public:
  /// Notes that an extent is fetched; true when that has ended a pass, and plan() is due.
  bool record(Block& block, Extent extent);

  /// Notes that bytes are copied which there was no room to keep.
  void missed(std::size_t bytes) noexcept {
    missed_ += bytes;
  }

  /// Chooses what stays within `budget` bytes; true if that is another choice than before.
  bool plan(std::size_t budget);

  /// Whether the plan was made for another order.
  bool isStale() const noexcept {
    return stale_;
  }

  /// Has Blocks that are changed together, while `readBytes` are there too, stay beside the plan, where that leaves room for them; whether
  /// they do.
  bool admit(const std::vector<Block*>& changed, std::size_t readBytes, std::size_t budget);

  /// There was no memory for what is changed together with this Block: it is not admitted before there is another plan.
  void dismiss(const Block& block) {
    guests_.dismiss(block);
  }

  /// Whether an extent stays when nothing pins it; `room` says whether it could.
  bool keeps(const Block& block, Extent extent, bool room) const;

  void forget(const Block& block) noexcept;

  const Forecast& forecast() const noexcept {
    return forecast_;
  }

  std::size_t entryCount() const noexcept {
    return count_;
  }

 private:
  struct Key {
    const Block* block;
    Extent extent;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Entry {
    std::uint64_t lastPass = 0;
    std::uint64_t askedAt = 0; // `missed_` then
    std::uint64_t leftPlan = 0; // at the end of which pass; known until the next one ends, as its copies are to be let go
    bool planned = false;
    bool stays = false;
  };
  struct Pass {
    std::vector<Key> order;
    std::size_t bytes = 0; // without what has been forgotten
  };

  Entry& entryOf(const Key& key);
  const Entry* find(const Key& key) const;
  void erase(const Key& key);
  void finishPass();
  void dropUnasked();
  void leavePlan(const Key& key);
  std::optional<bool> planned(const Key& key) const;
  Guests::Plan planned() const;

  Forecast forecast_;
  std::unordered_map<const Block*, std::unordered_map<Extent, Entry, ExtentHash>> entries_;
  std::size_t count_ = 0; // of them
  std::vector<Key> unplanned_; // all of those that are no part of the plan, and maybe some that are again
  std::uint64_t number_ = 1;
  std::uint64_t missed_ = 0;
  std::uint64_t lookAt_ = 0; // at what of `missed_` something may be due to leave the plan
  bool left_ = false; // something has, and nobody was told
  Pass current_;
  Pass planned_;
  bool stale_ = false;
  std::size_t kept_ = 0; // bytes, by the plan
  Guests guests_;
};

} // namespace offload
