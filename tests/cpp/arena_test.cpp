// The host allocator: ranges and regions, page-locking, and memory that copies still use.
#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "arena_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kShared = 1 << 16;
constexpr std::size_t kOwn = 1 << 15;

TEST(Arena, RangesAreAlignedAndApart) {
  Arena arena(nullptr, smallRegions());
  std::map<std::uintptr_t, std::size_t> ranges;
  for (const std::size_t bytes : {0U, 1U, 511U, 512U, 513U, 4096U, 40'000U, 65'536U, 100'000U}) {
    const HostRange range = arena.allocate(bytes);
    EXPECT_EQ(range.bytes, bytes);
    EXPECT_FALSE(range.pinned);
    const auto begin = reinterpret_cast<std::uintptr_t>(range.data);
    EXPECT_EQ(begin % 512, 0U);
    std::memset(range.data, 1, bytes);
    const auto next = ranges.lower_bound(begin);
    EXPECT_TRUE(next == ranges.end() || begin + bytes <= next->first);
    EXPECT_TRUE(next == ranges.begin() || std::prev(next)->first + std::prev(next)->second <= begin);
    ranges[begin] = bytes;
    arena.validate();
  }
  for (const auto& [begin, bytes] : ranges) {
    arena.free(reinterpret_cast<void*>(begin), {});
    arena.validate();
  }
  EXPECT_EQ(arena.stats().allocated, 0U);
  EXPECT_EQ(arena.trim(), arena.stats().reservedPeak);
  EXPECT_EQ(arena.stats().reserved, 0U);
}

TEST(Arena, SmallRequestsShareARegionAndLargeOnesHaveTheirOwn) {
  Arena arena(nullptr, smallRegions());
  arena.allocate(1000);
  arena.allocate(1000);
  EXPECT_EQ(arena.stats().reserved, kShared);
  arena.allocate(kOwn); // there is room for it
  EXPECT_EQ(arena.stats().reserved, kShared);
  arena.allocate(kOwn + 1);
  EXPECT_EQ(arena.stats().reserved, kShared + kOwn + 4096);
  EXPECT_EQ(arena.stats().count, 4U);
}

TEST(Arena, FreedNeighboursBecomeOneRange) {
  for (const std::vector<std::size_t>& order :
       {std::vector<std::size_t>{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3}, {1, 3, 0, 2}}) {
    Arena arena(nullptr, smallRegions());
    std::vector<void*> ranges;
    for (int i = 0; i < 4; ++i) {
      ranges.push_back(arena.allocate(kShared / 4).data);
    }
    for (const std::size_t i : order) {
      arena.free(ranges[i], {});
      arena.validate();
    }
    arena.allocate(kShared);
    EXPECT_EQ(arena.stats().reserved, kShared);
  }
}

TEST(Arena, TheBestFitWins) {
  ArenaOptions options = smallRegions();
  options.slabBytes = 0;
  Arena arena(nullptr, options);
  void* const large = arena.allocate(8192).data;
  arena.allocate(512);
  void* const small = arena.allocate(1024).data;
  arena.allocate(512);
  arena.free(large, {});
  arena.free(small, {});
  EXPECT_EQ(arena.allocate(1000).data, small);
  EXPECT_EQ(arena.allocate(1000).data, large);
}

TEST(Arena, RandomRequestsKeepTheirBytes) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimRandom random(seed);
    ArenaRig rig;
    std::vector<std::pair<HostRange, Bytes>> live;
    for (std::uint64_t step = 0; step < 200; ++step) {
      if (live.empty() || random.oneIn(2)) {
        const HostRange range = rig.arena.allocate(1 + random.below(random.oneIn(8) ? 2 * kShared : 5000));
        const Bytes value = pattern(step, range.bytes);
        std::copy(value.begin(), value.end(), static_cast<unsigned char*>(range.data));
        live.emplace_back(range, value);
      } else if (random.oneIn(16)) {
        rig.arena.trim();
      } else {
        const auto at = live.begin() + static_cast<std::ptrdiff_t>(random.below(live.size()));
        ASSERT_EQ(std::memcmp(at->first.data, at->second.data(), at->second.size()), 0) << "seed " << seed;
        rig.arena.free(
            at->first.data, random.oneIn(2) ? std::vector<Token>{rig.pool.record(rig.stream)} : std::vector<Token>{});
        live.erase(at);
      }
      ASSERT_NO_THROW(rig.arena.validate()) << "seed " << seed;
    }
    for (const auto& [range, value] : live) {
      rig.arena.free(range.data, {});
    }
    rig.sim.drain();
    rig.arena.trim();
    ASSERT_EQ(rig.arena.stats().reserved, 0U);
    ASSERT_TRUE(rig.link.locked.empty());
  }
}

TEST(Arena, APendingRangeIsReusedOnlyWhenItsTokensAreDone) {
  ArenaRig rig;
  // Fills its region, so that reuse is the only way to the same address and a new region the other.
  void* const data = rig.arena.allocate(kShared).data;
  void* const device = rig.sim.allocate(64, rig.stream);
  rig.sim.copyToDevice(device, data, 64, rig.stream);
  const Token copied = rig.pool.record(rig.stream);
  rig.arena.free(data, {Token(), rig.pool.record(rig.sim.createStream(0)), copied});
  EXPECT_EQ(rig.arena.stats().allocated, 0U);
  rig.arena.validate();
  EXPECT_NE(rig.arena.allocate(kShared).data, data);
  rig.sim.drain();
  EXPECT_EQ(rig.arena.allocate(kShared).data, data);
  rig.arena.validate();
  rig.sim.free(device, rig.stream);
}

TEST(Arena, TrimLeavesWhatIsUsedOrPending) {
  ArenaRig rig;
  void* const used = rig.arena.allocate(kShared).data;
  void* const pending = rig.arena.allocate(kShared).data;
  void* const unused = rig.arena.allocate(kShared).data;
  rig.sim.launchHost([] {}, rig.stream);
  const Token token = rig.pool.record(rig.stream);
  rig.arena.free(pending, {token});
  rig.arena.free(unused, {});
  EXPECT_EQ(rig.arena.trim() % kShared, 0U); // `pending` may turn out to be done
  token.wait();
  rig.arena.trim();
  EXPECT_EQ(rig.arena.stats().reserved, kShared);
  rig.arena.free(used, {});
  EXPECT_EQ(rig.arena.trim(), kShared);
}

TEST(Arena, KeepsForeignMemoryAliveUntilItsTokensAreDone) {
  ArenaRig rig;
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = owner;
  rig.sim.launchHost([&] { EXPECT_FALSE(alive.expired()); }, rig.stream);
  const Token token = rig.pool.record(rig.stream);
  rig.arena.keepAlive(std::move(owner), {token});
  EXPECT_FALSE(alive.expired());
  rig.arena.validate();
  token.wait();
  rig.arena.trim();
  EXPECT_TRUE(alive.expired());
}

TEST(Arena, ItsEndWaitsForWhatIsPending) {
  SimLink sim({.bias = SimBias::Late});
  EventPool pool(sim);
  const Stream stream = sim.createStream(0);
  bool ran = false;
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = owner;
  {
    Arena arena(&sim, smallRegions());
    void* const data = arena.allocate(64).data;
    sim.launchHost(
        [&, data] {
          ran = !alive.expired();
          std::memset(data, 1, 64);
        },
        stream);
    arena.free(data, {pool.record(stream)});
    arena.keepAlive(std::move(owner), {pool.record(stream)});
  }
  EXPECT_TRUE(ran);
  EXPECT_TRUE(alive.expired());
}

TEST(Arena, PageLocksRegionsForAsLongAsItHasThem) {
  ArenaRig rig;
  const HostRange small = rig.arena.allocate(100);
  const HostRange large = rig.arena.allocate(kShared);
  EXPECT_TRUE(small.pinned && large.pinned);
  EXPECT_EQ(rig.link.locked.size(), 2U);
  EXPECT_EQ(rig.arena.stats().pinned, 2 * kShared);
  rig.arena.free(large.data, {});
  EXPECT_EQ(rig.link.locked.size(), 2U);
  rig.arena.trim();
  EXPECT_EQ(rig.link.locked.size(), 1U);
  EXPECT_EQ(rig.arena.stats().pinned, kShared);
}

TEST(Arena, MemoryThatCanNotBePageLockedIsPageable) {
  ArenaRig rig;
  rig.link.fail(1, Failing::FromThenOn);
  const HostRange range = rig.arena.allocate(100);
  EXPECT_FALSE(range.pinned);
  rig.link.fail(0);
  std::memset(range.data, 1, 100);
  EXPECT_EQ(rig.arena.stats().pinned, 0U);
  rig.arena.free(range.data, {});
  rig.arena.trim();
  EXPECT_TRUE(rig.arena.allocate(100).pinned);
}

TEST(Arena, PoisonsWhatItHandsOut) {
  ArenaOptions options = smallRegions();
  options.poison = true;
  Arena arena(nullptr, options);
  for (int repeat = 0; repeat < 2; ++repeat) {
    void* const data = arena.allocate(1000).data;
    EXPECT_EQ(Bytes(1000, 0xFF), Bytes(static_cast<unsigned char*>(data), static_cast<unsigned char*>(data) + 1000));
    std::memset(data, 1, 1000);
    arena.free(data, {});
  }
}

TEST(Arena, SaysHowMuchWasRefused) {
  Arena arena(nullptr, smallRegions());
  arena.allocate(1000);
  for (const std::size_t bytes : {std::size_t{1} << 60, SIZE_MAX - 1, SIZE_MAX}) {
    try {
      arena.allocate(bytes);
      FAIL() << bytes;
    } catch (const OutOfMemory& error) {
      EXPECT_EQ(error.where(), OutOfMemory::Where::Host);
      EXPECT_EQ(error.bytes(), bytes);
      EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos);
    }
    arena.validate();
  }
  EXPECT_EQ(arena.stats().count, 1U);
  arena.allocate(1000);
}

TEST(Arena, WhatTheDeviceCanNotTellIsNotReusedAndNotLost) {
  ArenaRig rig;
  EventPool pool(rig.link);
  void* const data = rig.arena.allocate(kShared).data;
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = owner;
  rig.arena.free(data, {pool.record(rig.stream)});
  rig.arena.keepAlive(std::move(owner), {pool.record(rig.stream)});
  rig.link.fail(1, Failing::FromThenOn);
  EXPECT_NE(rig.arena.allocate(kShared).data, data);
  rig.arena.validate();
  EXPECT_FALSE(alive.expired());
  rig.link.fail(0);
  rig.sim.drain();
  EXPECT_EQ(rig.arena.allocate(kShared).data, data);
  EXPECT_TRUE(alive.expired());
}

TEST(Arena, CountsAndPeaks) {
  Arena arena(nullptr, smallRegions());
  void* const one = arena.allocate(1000).data;
  void* const two = arena.allocate(1).data;
  arena.free(one, {});
  ArenaStats stats = arena.stats();
  EXPECT_EQ(stats.allocated, 512U);
  EXPECT_EQ(stats.allocatedPeak, 1536U);
  EXPECT_EQ(stats.count, 1U);
  EXPECT_EQ(stats.allocations, 2U);
  arena.resetPeaks();
  EXPECT_EQ(arena.stats().allocatedPeak, 512U);
  arena.free(two, {});
  arena.trim();
  arena.resetPeaks();
  EXPECT_EQ(arena.stats().reservedPeak, 0U);
}

TEST(Arena, PendingRangesCostAnAllocationFewQuestions) {
  ArenaRig rig;
  rig.arena.allocate(1000);
  std::vector<void*> ranges;
  for (int i = 0; i < 500; ++i) {
    ranges.push_back(rig.arena.allocate(2048).data);
  }
  rig.sim.launchHost([] {}, rig.stream);
  for (void* range : ranges) {
    rig.arena.free(range, {rig.pool.record(rig.stream)});
  }
  // The last of them say nothing yet, whatever the seed makes of the first few questions.
  rig.link.queries = 0;
  rig.link.answer = false;
  rig.arena.allocate(1000);
  EXPECT_LE(rig.link.queries, 2);
  rig.link.queries = 0;
  rig.arena.allocate(100 * kShared); // nothing fits
  EXPECT_LE(rig.link.queries, 4);
  rig.arena.validate();
  rig.link.answer.reset();
  rig.sim.drain();
  EXPECT_EQ(rig.arena.stats().count, 3U);
  rig.arena.trim();
  EXPECT_EQ(rig.arena.stats().reserved, 101 * kShared);
}

TEST(Arena, PendingRangesComeBackWithoutATrim) {
  ArenaRig rig;
  auto owner = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = owner;
  // One that is never done stands before it.
  rig.link.answer = false;
  rig.arena.free(rig.arena.allocate(512).data, {rig.pool.record(rig.stream)});
  rig.arena.keepAlive(std::move(owner), {});
  for (int i = 0; i < 4; ++i) {
    rig.arena.free(rig.arena.allocate(512).data, {});
  }
  EXPECT_TRUE(alive.expired());
}

TEST(Arena, ThreadsAllocateFreeAndValidateAtOnce) {
  ArenaRig rig;
  std::atomic<int> running{3};
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      SimRandom random(thread);
      const Stream stream = rig.sim.createStream(0);
      std::vector<HostRange> live;
      auto release = [&] {
        const HostRange range = live.back();
        const auto* const data = static_cast<unsigned char*>(range.data);
        EXPECT_EQ(static_cast<std::size_t>(std::count(data, data + range.bytes, thread)), range.bytes);
        rig.arena.free(range.data, {rig.pool.record(stream)});
        live.pop_back();
      };
      for (int repeat = 0; repeat < 300; ++repeat) {
        live.push_back(rig.arena.allocate(1 + random.below(random.oneIn(16) ? 2 * kShared : 4000)));
        std::memset(live.back().data, static_cast<int>(thread), live.back().bytes);
        while (live.size() > random.below(12)) {
          release();
        }
        if (random.oneIn(32)) {
          rig.arena.trim();
        }
      }
      while (!live.empty()) {
        release();
      }
      --running;
    });
  }
  while (running > 0) {
    EXPECT_NO_THROW(rig.arena.validate());
  }
  for (auto& thread : threads) {
    thread.join();
  }
  rig.sim.drain();
  rig.arena.trim();
  EXPECT_EQ(rig.arena.stats().reserved, 0U);
  EXPECT_EQ(rig.link.lockedBytes, 0U);
}

} // namespace
} // namespace offload
