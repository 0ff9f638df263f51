// What kinds of random programs there are, and the systems that they run on.
#pragma once

#include "core_rig.h"
#include "fuzz_choices.h"

namespace offload::core_test {

inline constexpr std::size_t kSteps = 60;
inline constexpr std::size_t kMostBlocks = 6;
inline constexpr std::size_t kMostPins = 8;
inline constexpr std::size_t kMostAhead = 3;
inline constexpr std::uint64_t kFailingCalls = 12; // of a step: which of them fails
inline constexpr std::size_t kMostBytes = 2048; // of a Block

enum class Kind {
  Any, // fetches in no order
  Failing, // the same over a link that fails now and then
  Ordered, // most fetches come in an order that repeats, with exceptions, as a training step's do; every other link fails
  Batches, // the same with more and smaller Blocks and fewer exceptions: several are copied at once
  Saved, // results go home at once, parts of larger memory among them, and come back ahead of their use; every other link fails
  Jobs, // the host writes later, as late as it may; half of the programs are ordered
  Updates, // Blocks are changed on the device, in the cache's memory; half of the programs are ordered, every other link fails
  Shared, // Blocks become memory that another process writes to, too; half of the programs are ordered, every other link fails
};

inline bool isOrdered(Kind kind, std::uint64_t seed) {
  return kind == Kind::Ordered || kind == Kind::Batches ||
      ((kind == Kind::Shared || kind == Kind::Jobs || kind == Kind::Updates) && seed % 4 >= 2);
}

/// Where an order that repeats takes place: all on one device, each Block on one of them, or forward on one and back on the next.
inline std::size_t deviceOfTurn(std::uint64_t seed, std::size_t block, bool forward) {
  return seed % 3 == 0 ? 0 : seed % 3 == 1 ? block : static_cast<std::size_t>(!forward);
}

/// None, some, or what is free; and half of the time a write buffer.
inline void giveBudget(CoreOptions& options, Choices& choices, std::uint64_t seed) {
  SimRandom random(seed * 3 + 1);
  options.cache.headroomBytes = options.sim.deviceBytes / 4;
  options.cache.budgetBytes = choices.oneIn("noBudget", 2, random) ? 0 : std::size_t{256} << choices.below("budget", 7, random);
  if (choices.oneIn("automatic", 3, random)) {
    options.cache.budgetBytes.reset();
  }
  options.cache.writeBufferShare = choices.oneIn("buffers", 2, random) ? 0.25 : 0;
}

/// Blocks are pageable where the Arena is past its limit, and have no ring where the system refuses too.
inline void limitPageLocking(CoreOptions& options, Choices& choices, std::uint64_t seed) {
  SimRandom random(~seed); // not the program's own numbers, which would make other programs of known seeds
  options.cache.chunkBytes = std::size_t{128} << choices.below("chunk", 5, random);
  if (choices.oneIn("limited", 2, random)) {
    options.arena.pinnedLimit = choices.below("locked", 1 << 14, random);
  }
  options.sim.wantsRegistration = true;
  if (choices.oneIn("refusing", 4, random)) {
    options.sim.registrationLimit = choices.below("registered", 1 << 14, random);
  }
}

/// Waits are timed.
inline void giveTimers(CoreOptions& options, Choices& choices, std::uint64_t seed) {
  SimRandom random(seed * 5 + 2);
  options.sim.tellsTime = choices.oneIn("tellsTime", 4, random);
}

inline CoreOptions programOptions(Choices& choices, std::uint64_t seed, Kind kind) {
  CoreOptions options;
  choices.begin("system");
  options.sim.seed = seed;
  options.sim.devices = 1 + static_cast<int>(choices.below("secondDevice", 2));
  options.sim.deviceBytes = std::size_t{1024} << choices.below("deviceBytes", 6);
  options.cache.ringBytes = std::size_t{512} << choices.below("ringBytes", 6);
  options.cache.evictAtUnpin = choices.oneIn("evicts", 8);
  options.cache.poison = choices.oneIn("poisons", 4);
  options.cache.copyDelay = std::chrono::microseconds(choices.oneIn("delays", 64) ? 1 : 0);
  options.arena.sharedRegionBytes = std::size_t{4096} << choices.below("sharedRegion", 3);
  options.arena.ownRegionBytes = choices.oneIn("smallRegions", 4) ? 1024 : 1 << 14;
  options.arena.poison = choices.oneIn("poisonsHost", 4);
  if (isOrdered(kind, seed)) { // too little for all Blocks, and enough to look ahead
    options.sim.deviceBytes = 1 << 16;
    options.cache.ringBytes = std::size_t{2048} << (seed % 3);
    options.cache.evictAtUnpin = false;
    options.cache.batchLeast = 128;
    options.cache.batchMost = 3 * kMostBytes / 4;
    options.cache.batchBytes = std::size_t{512} << (seed % 2);
  }
  if (kind == Kind::Batches) options.cache.ringBytes = 4096;
  if (kind == Kind::Updates) options.sim.deviceBytes *= 16;
  if (kind == Kind::Jobs) options.cache.hostJobs = HostJobs::When::Wanted;
  if (kind != Kind::Batches || seed % 4 == 0) limitPageLocking(options, choices, seed);
  giveBudget(options, choices, seed);
  return options;
}

} // namespace offload::core_test
