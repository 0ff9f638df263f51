// Two devices over one host memory: each has Slots, a ring, a budget and an order of its own, and they agree on which bytes are newest.
#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 1024;
constexpr Extent kWhole{0, kBytes};

CoreOptions twoDevices(std::uint64_t seed = 0) {
  CoreOptions options;
  options.sim.seed = seed;
  options.sim.devices = 2;
  options.cache.budgetBytes = 8 * kBytes;
  return options;
}

/// `body` gets a stream of each device.
template <class Body>
void onEverySeed(Body body) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig(twoDevices(seed));
    ASSERT_NO_THROW(body(rig, rig.sim.createStream(0), rig.sim.createStream(1))) << "seed " << seed;
    for (const int device : {0, 1}) {
      rig.cache.emptyCache(device);
      ASSERT_EQ(rig.sim.bytesInUse(device), 0U) << "seed " << seed;
    }
    ASSERT_NO_THROW(rig.sim.drain()) << "seed " << seed;
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

/// Fetches all of a Block, and lets a kernel look whether its bytes are these.
Pin expectOn(Rig& rig, Block& block, Stream stream, const Bytes& value) {
  Pin pin = rig.cache.fetch(block, kWhole, stream);
  const void* const data = pin.data();
  rig.sim.launch(stream, [=] { EXPECT_EQ(std::memcmp(data, value.data(), kBytes), 0); }, {{data, kBytes}}, {});
  return pin;
}

std::uint64_t fetched(const Rig& rig, int device) {
  return rig.cache.transferStats(device).copiesToDevice;
}
std::uint64_t hits(const Rig& rig, int device) {
  return rig.cache.stats(device).hits;
}

TEST(TwoDevices, HaveSlotsOfTheirOwn) {
  onEverySeed([](Rig& rig, Stream one, Stream two) {
    const auto block = rig.newBlock(pattern(1, kBytes));
    const Pin here = expectOn(rig, *block, one, pattern(1, kBytes));
    const Pin there = expectOn(rig, *block, two, pattern(1, kBytes));
    EXPECT_NE(here.data(), there.data());
    EXPECT_EQ(here.device(), 0);
    EXPECT_EQ(there.device(), 1);
    for (const int device : {0, 1}) {
      EXPECT_EQ(rig.sim.bytesInUse(device), kBytes);
      EXPECT_EQ(rig.cache.stats(device).fetches, 1U);
      EXPECT_EQ(hits(rig, device), 0U);
    }
  });
}

TEST(TwoDevices, BothSeeWhatTheHostWrites) {
  onEverySeed([](Rig& rig, Stream one, Stream two) {
    const auto block = rig.newBlock(pattern(1, kBytes));
    const Pin before = expectOn(rig, *block, one, pattern(1, kBytes));
    expectOn(rig, *block, two, pattern(1, kBytes));
    rig.write(*block, pattern(2, kBytes)); // waits for both copies
    EXPECT_EQ(rig.cache.stats(0).slotBytes, kBytes) << "what is pinned stays what it was";
    EXPECT_EQ(rig.cache.stats(1).slotBytes, 0U);
    for (const Stream stream : {one, two}) {
      expectOn(rig, *block, stream, pattern(2, kBytes));
      EXPECT_EQ(fetched(rig, stream.device), 2U);
    }
    const auto old = rig.readOnDevice(one, before.data(), kBytes);
    rig.sim.drain();
    EXPECT_EQ(*old, pattern(1, kBytes));
  });
}

TEST(TwoDevices, OneGivesUpItsSlotsAlone) {
  onEverySeed([](Rig& rig, Stream one, Stream two) {
    const auto block = rig.newBlock(pattern(1, kBytes));
    for (const bool relieves : {false, true}) {
      expectOn(rig, *block, one, pattern(1, kBytes));
      expectOn(rig, *block, two, pattern(1, kBytes));
      const std::uint64_t before = hits(rig, 1);
      EXPECT_EQ(relieves ? rig.cache.relieve(0, 0, kBytes, 8 * kBytes) : rig.cache.emptyCache(0), kBytes);
      EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U);
      expectOn(rig, *block, two, pattern(1, kBytes));
      EXPECT_EQ(hits(rig, 1), before + 1);
    }
    expectOn(rig, *block, one, pattern(1, kBytes));
    EXPECT_EQ(fetched(rig, 0), 3U);
    EXPECT_EQ(fetched(rig, 1), 1U);
  });
}

TEST(TwoDevices, AResultOfTheOtherComesByWayOfTheHost) {
  onEverySeed([](Rig& rig, Stream one, Stream two) {
    const auto block = rig.newBlock(pattern(1, kBytes));
    expectOn(rig, *block, two, pattern(1, kBytes));
    rig.cache.adopt(*block, rig.newResult(one, pattern(2, kBytes)), one);
    EXPECT_EQ(rig.cache.stats(0).dirtyBytes, kBytes);
    EXPECT_EQ(rig.cache.stats(1).slotBytes, 0U) << "which is stale";
    expectOn(rig, *block, two, pattern(2, kBytes));
    EXPECT_EQ(rig.cache.transferStats(0).copiesToHost, 1U);
    EXPECT_EQ(rig.cache.stats(0).dirtyBytes, 0U);
    expectOn(rig, *block, one, pattern(2, kBytes));
    EXPECT_EQ(fetched(rig, 0), 0U) << "it is there still";
    EXPECT_EQ(rig.read(*block), pattern(2, kBytes));
    EXPECT_EQ(rig.cache.transferStats(0).copiesToHost, 1U);
  });
}

TEST(TwoDevices, TheNewestResultWins) {
  onEverySeed([](Rig& rig, Stream one, Stream two) {
    const auto block = rig.newBlock(kBytes);
    rig.cache.adopt(*block, rig.newResult(one, pattern(1, kBytes)), one);
    const Pin first = expectOn(rig, *block, one, pattern(1, kBytes));
    rig.cache.adopt(*block, rig.newResult(two, pattern(2, kBytes)), two);
    EXPECT_EQ(rig.cache.stats(0).dirtyBytes, 0U) << "nobody wants the older one";
    expectOn(rig, *block, one, pattern(2, kBytes));
    rig.cache.adopt(*block, rig.newResult(one, pattern(3, kBytes)), one);
    expectOn(rig, *block, two, pattern(3, kBytes));
    EXPECT_EQ(rig.read(*block), pattern(3, kBytes));
    const auto old = rig.readOnDevice(one, first.data(), kBytes);
    rig.sim.drain();
    EXPECT_EQ(*old, pattern(1, kBytes));
  });
}

TEST(TwoDevices, APartThatOneStoresKeepsTheRestOfTheOthersResult) {
  onEverySeed([](Rig& rig, Stream one, Stream two) {
    const auto block = rig.newBlock(kBytes);
    rig.cache.adopt(*block, rig.newResult(one, pattern(1, kBytes)), one);
    const DeviceBuffer part = rig.newResult(two, pattern(2, kBytes / 2));
    rig.cache.store(*block, {0, kBytes / 2}, part.data, two);
    Bytes both = pattern(1, kBytes);
    const Bytes half = pattern(2, kBytes / 2);
    std::copy(half.begin(), half.end(), both.begin());
    for (const Stream stream : {two, one}) expectOn(rig, *block, stream, both);
    EXPECT_EQ(rig.read(*block), both);
  });
}

TEST(TwoDevices, ABlockGoesFromBoth) {
  onEverySeed([](Rig& rig, Stream one, Stream two) {
    auto block = rig.newBlock(pattern(1, kBytes));
    expectOn(rig, *block, one, pattern(1, kBytes));
    const Pin pin = rig.cache.fetch(*block, kWhole, two);
    block.reset();
    EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U);
    EXPECT_EQ(rig.cache.stats(1).slotBytes, kBytes);
    const auto next = rig.newBlock(pattern(2, kBytes)); // the host bytes anew, if the copies are done
    const auto seen = rig.readOnDevice(two, pin.data(), kBytes);
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(1, kBytes));
  });
}

TEST(TwoDevices, HaveARingOfTheirOwn) {
  CoreOptions options = twoDevices();
  options.cache.budgetBytes = 0;
  options.cache.ringBytes = 2 * kBytes;
  options.cache.prefetch = false;
  Rig rig(options);
  const Stream one = rig.sim.createStream(0);
  const Stream two = rig.sim.createStream(1);
  const auto kept = rig.newBlock(pattern(0, kBytes));
  expectOn(rig, *kept, two, pattern(0, kBytes));
  std::vector<Rig::BlockPtr> others;
  for (std::uint64_t k = 1; k < 6; ++k) {
    others.push_back(rig.newBlock(pattern(k, kBytes)));
    expectOn(rig, *others.back(), one, pattern(k, kBytes));
  }
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 2 * kBytes);
  EXPECT_EQ(rig.cache.stats(0).evictions, 3U);
  expectOn(rig, *kept, two, pattern(0, kBytes));
  EXPECT_EQ(hits(rig, 1), 1U);
  EXPECT_EQ(rig.cache.stats(1).evictions, 0U);
  rig.sim.drain();
}

TEST(TwoDevices, ResultsOfOneTakeNoneOfTheOthersBudget) {
  CoreOptions options = twoDevices();
  options.cache.budgetBytes = 2 * kBytes;
  Rig rig(options);
  const Stream streams[] = {rig.sim.createStream(0), rig.sim.createStream(1)};
  std::vector<Rig::BlockPtr> blocks;
  const auto adopt = [&](Stream stream) {
    blocks.push_back(rig.newBlock(kBytes));
    rig.cache.adopt(*blocks.back(), rig.newResult(stream, pattern(blocks.size(), kBytes)), stream);
  };
  for (const Stream stream : streams) {
    adopt(stream);
    adopt(stream);
  }
  for (const int device : {0, 1}) EXPECT_EQ(rig.cache.stats(device).dirtyBytes, 2 * kBytes);
  adopt(streams[1]);
  EXPECT_EQ(rig.cache.transferStats(0).copiesToHost, 0U);
  EXPECT_EQ(rig.cache.transferStats(1).copiesToHost, 1U) << "the oldest";
  EXPECT_EQ(rig.cache.stats(1).dirtyBytes, 2 * kBytes);
  for (std::size_t k = 0; k < blocks.size(); ++k) EXPECT_EQ(rig.read(*blocks[k]), pattern(k + 1, kBytes));
}

/// The same Blocks forward on the one and backward on the other, a fetch of each in turn.
TEST(TwoDevices, HaveAnOrderOfTheirOwn) {
  CoreOptions options = twoDevices();
  options.cache.budgetBytes = 0;
  options.cache.ringBytes = 4 * kBytes;
  Rig rig(options);
  const Stream one = rig.sim.createStream(0);
  const Stream two = rig.sim.createStream(1);
  std::vector<Rig::BlockPtr> blocks;
  for (std::uint64_t k = 0; k < 8; ++k) blocks.push_back(rig.newBlock(pattern(k, kBytes)));
  const auto pass = [&] {
    for (std::uint64_t k = 0; k < 8; ++k) {
      expectOn(rig, *blocks[k], one, pattern(k, kBytes));
      expectOn(rig, *blocks[7 - k], two, pattern(7 - k, kBytes));
    }
  };
  for (int repeat = 0; repeat < 4; ++repeat) pass();
  const ResidencyStats before[] = {rig.cache.stats(0), rig.cache.stats(1)};
  pass();
  for (const int device : {0, 1}) {
    const ResidencyStats stats = rig.cache.stats(device);
    EXPECT_EQ(stats.hits - before[device].hits, 8U) << "all of them were ahead";
    EXPECT_EQ(stats.prefetchesWasted, 0U);
  }
  rig.sim.drain();
}

/// A result of the one that the other expects is copied ahead, newest bytes and all, or not at all.
TEST(TwoDevices, WhatIsExpectedOnOneAndNewerOnTheOther) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreOptions options = twoDevices(seed);
    options.cache.ringBytes = 4 * kBytes;
    Rig rig(options);
    const Stream one = rig.sim.createStream(0);
    const Stream two = rig.sim.createStream(1);
    std::vector<Rig::BlockPtr> blocks;
    for (std::uint64_t k = 0; k < 8; ++k) blocks.push_back(rig.newBlock(pattern(k, kBytes)));
    for (std::uint64_t repeat = 0; repeat < 6; ++repeat) {
      for (std::uint64_t k = 0; k < 8; ++k) {
        const std::uint64_t tag = 8 * repeat + k;
        expectOn(rig, *blocks[k], one, pattern(tag, kBytes));
        rig.cache.adopt(*blocks[k], rig.newResult(two, pattern(tag + 8, kBytes)), two);
      }
    }
    rig.sim.drain();
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

} // namespace
} // namespace offload
