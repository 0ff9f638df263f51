// Which fetch comes next, told from those that came before.
//
// Note [Forecast]
// A program asks for its weights as it did the step before, but the same weight has different successors on the way forward and on
// the way back. So the history of fetches is kept, and a place in it that is *followed*: where the present has been before. Each
// fetch that is what comes after that place moves it on. One that is not looks for a new place: of the latest occurrences of
// the same extent the one with the longest common past, or, where none has any, the one near the old place. A layer that is skipped,
// or that comes twice, so loses the thread for one fetch, and one that is new does not move the place at all.
//
// How far a place is to be trusted is a count of fetches, the *run*. A fetch that was foretold adds one. One that was not leaves the
// past in common with the new place, or, where that is a few fetches away, half of the run if that is more: a layer that is left out
// does not make the order another one. Nor does a detour, a layer that comes in another's place: the place that was left for it is
// remembered for a while, and a fetch from there on, with no past elsewhere, goes on with half of the run that there was.
//
// What the way to a place a few fetches on has passed over is *late*, for as many fetches again: neighbours may have changed places. A
// fetch of it is as good as one that was foretold, and leaves the place where it is.
//
// What is written between two fetches, as by an optimizer, must not be copied before that has happened, neither for the next fetch nor
// for one after it: a fetch that found so many writes since the one before it is expected to find as many again.
#pragma once

#include "core/extent.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace offload {

struct Block;

/// Of one device; guarded by Residency.
class Forecast {
 public:
  struct Expected {
    Block* block;
    Extent extent;
    bool writtenFirst; // will be written before it is fetched, and has not been yet
  };

  /// Notes a fetch.
  void follow(Block& block, Extent extent);
  /// The fetch that comes `distance` after the last one, from 1 on; its block is null where that can't be told.
  Expected expected(std::uint64_t distance) const;
  /// How many fetches have been noted.
  std::uint64_t count() const noexcept {
    return base_ + history_.size();
  }
  /// Whether the last fetch was what had been expected.
  bool foretold() const noexcept {
    return foretold_;
  }
  /// Whether what was expected before the last fetch is so still, of the same fetches by their numbers.
  bool stands() const noexcept {
    return stands_;
  }
  /// What was expected, and may come yet.
  std::vector<Expected> late() const;
  /// How many of the last fetches speak for what is expected.
  std::uint64_t run() const noexcept {
    return run_;
  }

  void forget(const Block& block) noexcept;

 private:
  static constexpr std::uint64_t kNowhere = UINT64_MAX;

  struct Entry {
    Block* block;
    Extent extent;
    std::uint64_t last = kNowhere; // its latest occurrence
    std::uint64_t version = 0; // of the Block then
  };
  struct Occurrence {
    Entry* entry; // null once the Block is gone
    std::uint64_t before; // the occurrence of the same entry before this one
    std::uint64_t writes; // to the Block, between the two
    std::uint64_t since; // the first occurrence from which on there were none up to this one
  };

  Entry& entryOf(Block& block, Extent extent);
  bool holds(std::uint64_t index) const noexcept {
    return index >= base_ && index < count();
  }
  const Occurrence& at(std::uint64_t index) const {
    return history_[index - base_];
  }
  void resume(std::uint64_t index);
  void goTo(std::uint64_t place, std::uint64_t index);
  bool comesLate(const Entry& entry);
  static bool isNear(std::uint64_t place, std::uint64_t to) noexcept;
  void dropOldHalf();

  std::unordered_map<const Block*, std::unordered_map<Extent, Entry, ExtentHash>> entries_;
  std::vector<Occurrence> history_;
  std::uint64_t base_ = 0; // number of the first occurrence that is still kept
  std::uint64_t followed_ = kNowhere;
  std::uint64_t run_ = 0;
  std::uint64_t left_ = kNowhere; // the place that was followed before the last detour
  std::uint64_t leftAt_ = 0;
  std::uint64_t leftRun_ = 0; // as much of it as is left
  bool foretold_ = false;
  bool stands_ = false;
  std::vector<std::uint64_t> late_;
  std::uint64_t lateUntil_ = 0;
};

} // namespace offload
