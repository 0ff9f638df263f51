// What may be page-locked, what happens past it, and that locking stops nobody.
#include <condition_variable>
#include <thread>

#include "arena_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kMiB = std::size_t{1} << 20;

ArenaOptions withLimit(std::size_t limit) {
  ArenaOptions options = untouched();
  options.pinnedLimit = limit;
  return options;
}

void expectOneWarning(const std::vector<std::string>& warnings, const std::vector<std::string>& parts) {
  ASSERT_EQ(warnings.size(), 1U);
  for (const std::string& part : parts) {
    EXPECT_NE(warnings[0].find(part), std::string::npos) << warnings[0];
  }
}

TEST(ArenaLimit, PastItMemoryIsPageableAndOneWarningSaysSo) {
  ArenaRig rig(withLimit(512 * kMiB));
  std::size_t pinned = 0;
  for (int i = 0; i < 8; ++i) {
    pinned += rig.arena.allocate(100 * kMiB).pinned ? 100 * kMiB : 0;
  }
  EXPECT_EQ(pinned, 500 * kMiB);
  EXPECT_EQ(rig.arena.stats().pinned, pinned);
  EXPECT_EQ(rig.link.attempts, 5);
  expectOneWarning(
      rig.warnings,
      {std::to_string(100 * kMiB) + " bytes of host memory could not be page-locked",
       std::to_string(500 * kMiB) + " bytes are page-locked", std::to_string(512 * kMiB), "raise TORCH_OFFLOAD_PINNED_LIMIT"});
}

TEST(ArenaLimit, WhoWantsPageableMemoryGetsIt) {
  ArenaRig rig(withLimit(512 * kMiB));
  const HostRange locked = rig.arena.allocate(kMiB);
  rig.arena.free(locked.data, {});
  const HostRange pageable = rig.arena.allocate(kMiB, false);
  EXPECT_TRUE(locked.pinned);
  EXPECT_FALSE(pageable.pinned);
  EXPECT_EQ(rig.arena.allocate(kMiB).data, locked.data);
  rig.arena.free(pageable.data, {});
  EXPECT_TRUE(rig.arena.allocate(kMiB).pinned);
  EXPECT_FALSE(rig.arena.allocate(kMiB, false).pinned);
  EXPECT_TRUE(rig.warnings.empty());
}

TEST(ArenaLimit, WhatIsLeftServesSmallerRequests) {
  ArenaRig rig(withLimit(512 * kMiB));
  rig.arena.allocate(500 * kMiB);
  EXPECT_FALSE(rig.arena.allocate(100 * kMiB).pinned);
  EXPECT_TRUE(rig.arena.allocate(5 * kMiB).pinned);
  EXPECT_FALSE(rig.arena.allocate(20 * kMiB).pinned);
  std::size_t small = 0;
  while (rig.arena.allocate(64 << 10).pinned) {
    small += 64 << 10;
  }
  EXPECT_GE(small, 6 * kMiB);
  EXPECT_LE(rig.arena.stats().pinned, 512 * kMiB);
  EXPECT_EQ(rig.warnings.size(), 1U);
}

TEST(ArenaLimit, PastItWhatIsPendingIsAskedAFewAtATime) {
  ArenaRig rig(withLimit(8 * kMiB));
  const HostRange locked = rig.arena.allocate(8 * kMiB);
  rig.link.answer = false;
  std::vector<HostRange> pageable;
  for (int i = 0; i < 2000; ++i) pageable.push_back(rig.arena.allocate(32 << 10));
  for (const HostRange& range : pageable) rig.arena.free(range.data, {rig.pool.record(rig.sim.createStream(0))});
  const HostRange free = rig.arena.allocate(16 * kMiB);
  rig.arena.free(free.data, {});
  rig.link.queries = 0;
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(rig.arena.allocate(64 << 10).pinned);
  EXPECT_LE(rig.link.queries, 100 * 100);
  // What is locked and done with is found all the same, and comes first.
  rig.link.answer = true;
  rig.arena.free(locked.data, {rig.pool.record(rig.stream)});
  int tries = 1;
  while (!rig.arena.allocate(64 << 10).pinned) ++tries;
  EXPECT_LE(tries, 100);
  EXPECT_TRUE(rig.arena.allocate(64 << 10).pinned);
  rig.arena.validate();
}

TEST(ArenaLimit, WhatIsLockedAndJustDoneWithComesBeforePageableMemory) {
  ArenaRig rig(withLimit(8 * kMiB));
  const HostRange locked = rig.arena.allocate(8 * kMiB);
  rig.arena.free(rig.arena.allocate(16 * kMiB).data, {});
  EXPECT_FALSE(rig.arena.allocate(64 << 10).pinned);
  for (int i = 0; i < 8; ++i) {
    const HostRange other = rig.arena.allocate(64 << 10, false);
    rig.arena.free(other.data, {rig.pool.record(rig.sim.createStream(0))});
  }
  rig.arena.free(locked.data, {rig.pool.record(rig.stream)});
  rig.sim.drain();
  EXPECT_EQ(rig.arena.allocate(64 << 10).data, locked.data);
}

TEST(ArenaLimit, AReservationOfAWholeModelSpoilsNothing) {
  ArenaRig rig(withLimit(512 * kMiB));
  const HostRange model = rig.arena.allocate(2048 * kMiB);
  EXPECT_FALSE(model.pinned);
  EXPECT_EQ(rig.arena.stats().pinned, 0U);
  rig.arena.free(model.data, {});
  // What was reserved isn't locked, so it goes back, and what comes now is locked.
  for (std::size_t i = 1; i <= 5; ++i) {
    EXPECT_TRUE(rig.arena.allocate(100 * kMiB).pinned);
    EXPECT_EQ(rig.arena.stats().reserved, i * 100 * kMiB);
  }
}

TEST(ArenaLimit, AReservationThatFitsIsLockedAndServesWhatComesAfterIt) {
  ArenaRig rig(withLimit(2048 * kMiB));
  const HostRange model = rig.arena.allocate(2000 * kMiB);
  EXPECT_TRUE(model.pinned);
  rig.arena.free(model.data, {});
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(rig.arena.allocate(100 * kMiB).pinned);
  }
  EXPECT_EQ(rig.arena.stats().reserved, 2000 * kMiB);
  EXPECT_EQ(rig.link.attempts, 1);
}

TEST(ArenaLimit, WhatIsLockedAndUnusedMakesRoomForAHugeRequest) {
  ArenaRig rig(withLimit(512 * kMiB));
  std::vector<void*> parts;
  for (int i = 0; i < 4; ++i) {
    parts.push_back(rig.arena.allocate(100 * kMiB).data);
  }
  rig.arena.free(rig.arena.allocate(400 * kMiB).data, {}); // so much may be in use
  for (std::size_t i = 1; i < 4; ++i) {
    rig.arena.free(parts[i], {});
  }
  // Cached memory is kept where giving it back would not suffice.
  EXPECT_FALSE(rig.arena.allocate(480 * kMiB).pinned);
  EXPECT_EQ(rig.arena.stats().pinned, 400 * kMiB);
  EXPECT_TRUE(rig.arena.allocate(300 * kMiB).pinned);
  EXPECT_EQ(rig.arena.stats().pinned, rig.link.lockedBytes);
  EXPECT_LE(rig.link.lockedBytes, 512 * kMiB);
  rig.arena.validate();
}

TEST(ArenaLimit, ADriverThatRefusesIsNotAskedAtEveryTurn) {
  ArenaRig rig(untouched());
  rig.link.capacity = 512 * kMiB;
  std::size_t pinned = 0;
  for (int i = 0; i < 400; ++i) {
    pinned += rig.arena.allocate(3 * kMiB).pinned ? 3 * kMiB : 0;
  }
  EXPECT_GE(pinned, 500 * kMiB);
  EXPECT_LE(rig.link.refusals, 10);
  expectOneWarning(rig.warnings, {"could not be page-locked", "the system or the driver refused"});
  // Memory that has gone back is a reason to ask again.
  rig.link.capacity = SIZE_MAX;
  EXPECT_FALSE(rig.arena.allocate(3 * kMiB).pinned);
  rig.arena.trim();
  EXPECT_TRUE(rig.arena.allocate(3 * kMiB).pinned);
}

TEST(ArenaLimit, ADriverThatRefusesOneHugeRegionLocksTheRest) {
  ArenaRig rig(untouched());
  rig.link.capacity = 512 * kMiB;
  EXPECT_FALSE(rig.arena.allocate(2048 * kMiB).pinned);
  EXPECT_TRUE(rig.arena.allocate(400 * kMiB).pinned);
  EXPECT_TRUE(rig.arena.allocate(1000).pinned);
}

TEST(ArenaLimit, TheMachineOrContainerIsNotTakenWhole) {
  ArenaOptions options = untouched();
  MemoryLimits memory{1000 * kMiB, 900 * kMiB};
  options.memoryLimits = [&] { return memory; };
  {
    ArenaRig rig(options);
    EXPECT_TRUE(rig.arena.allocate(840 * kMiB).pinned);
    EXPECT_FALSE(rig.arena.allocate(20 * kMiB).pinned);
    expectOneWarning(
        rig.warnings, {std::to_string(840 * kMiB) + " bytes are page-locked", "85 % of the " + std::to_string(1000 * kMiB)});
  }
  memory.available = 100 * kMiB; // others use the rest
  ArenaRig rig(options);
  EXPECT_FALSE(rig.arena.allocate(60 * kMiB).pinned);
  EXPECT_TRUE(rig.arena.allocate(40 * kMiB).pinned);
  EXPECT_FALSE(rig.arena.allocate(20 * kMiB).pinned);
  expectOneWarning(rig.warnings, {std::to_string(100 * kMiB) + " bytes available", "0 bytes are page-locked"});
  memory.available = 400 * kMiB; // ours are not available any more, so this is what the others left
  rig.arena.trim(); // looks again at once
  EXPECT_TRUE(rig.arena.allocate(340 * kMiB).pinned);
}

TEST(ArenaLimit, HoldsExactlyForThreadsThatGrowAtOnce) {
  for (int repeat = 0; repeat < 10; ++repeat) {
    ArenaRig rig(withLimit(100 * kMiB));
    std::atomic<std::size_t> pinned{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (int i = 0; i < 4; ++i) {
          pinned += rig.arena.allocate(9 * kMiB).pinned ? 1 : 0;
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(pinned, 11U);
    EXPECT_EQ(rig.link.lockedBytes, 99 * kMiB);
    EXPECT_EQ(rig.warnings.size(), 1U);
    rig.arena.validate();
  }
}

/// Locks one region at a time, and only when told to.
class SlowLink final : public LockingLink {
 public:
  using LockingLink::LockingLink;
  bool registerHost(void* host, std::size_t bytes) override {
    if (bytes >= slowBytes) {
      std::unique_lock lock(gate);
      waiting = true;
      changed.notify_all();
      changed.wait(lock, [this] { return open; });
    }
    return LockingLink::registerHost(host, bytes);
  }
  std::mutex gate;
  std::condition_variable changed;
  bool waiting = false;
  bool open = false;
  std::size_t slowBytes = 256 * kMiB;
};

TEST(ArenaLimit, OthersGoOnWhileARegionIsLocked) {
  BasicArenaRig<SlowLink> rig(untouched());
  void* const cached = rig.arena.allocate(1000).data;
  HostRange large;
  std::thread slow([&] { large = rig.arena.allocate(256 * kMiB); });
  {
    std::unique_lock lock(rig.link.gate);
    rig.link.changed.wait(lock, [&] { return rig.link.waiting; });
  }
  rig.arena.free(cached, {});
  EXPECT_TRUE(rig.arena.allocate(1000).pinned); // from the cache
  EXPECT_TRUE(rig.arena.allocate(64 * kMiB).pinned); // a region of its own
  rig.arena.trim();
  rig.arena.validate();
  EXPECT_LT(rig.arena.stats().pinned, 256 * kMiB);
  {
    const std::lock_guard lock(rig.link.gate);
    rig.link.open = true;
    rig.link.changed.notify_all();
  }
  slow.join();
  EXPECT_TRUE(large.pinned);
  rig.arena.validate();
}

// What has no pages yet is still available by what the system says, and would count twice.
TEST(ArenaLimit, WhatIsBeingLockedIsNotAvailable) {
  std::atomic<std::size_t> available{1000 * kMiB};
  ArenaOptions options = untouched();
  options.memoryLimits = [&] { return MemoryLimits{4000 * kMiB, available}; };
  BasicArenaRig<SlowLink> rig(options);
  HostRange large;
  std::thread slow([&] { large = rig.arena.allocate(600 * kMiB); });
  {
    std::unique_lock lock(rig.link.gate);
    rig.link.changed.wait(lock, [&] { return rig.link.waiting; });
    rig.link.open = true; // for who comes next
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(60)); // so that the system is asked again
  EXPECT_FALSE(rig.arena.allocate(500 * kMiB).pinned);
  rig.link.changed.notify_all();
  slow.join();
  EXPECT_TRUE(large.pinned);
  available = 400 * kMiB;
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_TRUE(rig.arena.allocate(150 * kMiB).pinned);
  rig.arena.validate();
}

// What is given back while the system is asked is available already, and would count twice.
TEST(ArenaLimit, WhatIsGivenBackMeanwhileCountsOnce) {
  std::size_t used = 0;
  std::function<void()> meanwhile;
  ArenaOptions options = untouched();
  options.memoryLimits = [&] {
    if (auto call = std::exchange(meanwhile, nullptr)) {
      call();
    }
    return MemoryLimits{4000 * kMiB, 1000 * kMiB - used};
  };
  ArenaRig rig(options);
  void* const first = rig.arena.allocate(600 * kMiB).data;
  used = 600 * kMiB;
  meanwhile = [&] {
    rig.arena.free(first, {});
    EXPECT_EQ(rig.arena.trim(), 600 * kMiB);
    used = 0;
  };
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  EXPECT_TRUE(rig.arena.allocate(400 * kMiB).pinned);
  EXPECT_FALSE(rig.arena.allocate(600 * kMiB).pinned); // with what is left to others it is more than there is
  rig.arena.validate();
}

// The kernel refuses none of it, and would kill somebody when it is written.
TEST(ArenaLimit, NoMoreIsHeldThanThereIs) {
  ArenaOptions options = untouched();
  options.memoryLimits = [] { return MemoryLimits{1000 * kMiB, 1000 * kMiB, 100 * kMiB}; };
  ArenaRig rig(options);
  const HostRange locked = rig.arena.allocate(700 * kMiB);
  EXPECT_TRUE(locked.pinned);
  const HostRange pageable = rig.arena.allocate(300 * kMiB, false);
  try {
    rig.arena.allocate(200 * kMiB, false);
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.where(), OutOfMemory::Where::Host);
    const std::string has = "has " + std::to_string(1100 * kMiB) + ", swap included";
    EXPECT_NE(std::string(error.what()).find(has), std::string::npos) << error.what();
  }
  rig.arena.free(locked.data, {}); // what is cached makes way
  EXPECT_FALSE(rig.arena.allocate(800 * kMiB, false).pinned);
  EXPECT_EQ(rig.arena.stats().reserved, 1100 * kMiB);
  rig.arena.free(pageable.data, {});
  rig.arena.validate();
}

TEST(ArenaLimit, AWarningThatThrowsLeavesNothingBehind) {
  ArenaOptions options = withLimit(0);
  options.warn = [](const std::string& sentence) { throw Error(sentence); };
  SimLink sim;
  LockingLink link(sim);
  Arena arena(&link, options);
  EXPECT_THROW(arena.allocate(1000), Error);
  EXPECT_EQ(arena.stats().count, 0U);
  EXPECT_EQ(arena.stats().reserved, 0U);
  arena.validate();
  EXPECT_FALSE(arena.allocate(1000).pinned);
}

} // namespace
} // namespace offload
