// The cache: fetches and hits, extents, versions, eviction, and the order of everything that touches a Slot's memory.
#include "residency_rig.h"

namespace offload {
namespace {

using namespace core_test;

Bytes part(const Bytes& of, Extent extent) {
  return {of.begin() + static_cast<std::ptrdiff_t>(extent.begin), of.begin() + static_cast<std::ptrdiff_t>(extent.end)};
}

TEST(Residency, FetchBringsTheBytes) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Bytes value = pattern(1, 1000);
    const auto block = rig.newBlock(value);
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
    rig.sim.drain();
    EXPECT_EQ(*seen, value);
  });
}

TEST(Residency, ASecondFetchIsAHit) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Bytes value = pattern(1, 1000);
    const auto block = rig.newBlock(value);
    const void* const first = rig.cache.fetch(*block, {0, 1000}, stream).data();
    const Pin pin = rig.cache.fetch(*block, {256, 700}, stream);
    EXPECT_EQ(pin.data(), static_cast<const std::byte*>(first) + 256);
    EXPECT_EQ(rig.cache.stats(0).fetches, 2U);
    EXPECT_EQ(rig.cache.stats(0).hits, 1U);
    EXPECT_EQ(rig.cache.transferStats(0).copiesToDevice, 1U);
    EXPECT_EQ(rig.cache.transferStats(0).bytesToDevice, 1000U);
    const auto seen = rig.readOnDevice(stream, pin.data(), 444);
    rig.sim.drain();
    EXPECT_EQ(*seen, part(value, {256, 700}));
  });
}

TEST(Residency, AHitOnAnotherStreamWaitsForTheCopy) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Stream other = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    const Pin one = rig.cache.fetch(*block, {0, 1000}, stream);
    const Pin two = rig.cache.fetch(*block, {0, 1000}, other);
    EXPECT_EQ(one.data(), two.data());
    rig.readOnDevice(other, two.data(), 1000);
  });
}

TEST(Residency, OverlappingExtentsHaveSlotsOfTheirOwn) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Bytes value = pattern(1, 1000);
    const auto block = rig.newBlock(value);
    const Pin front = rig.cache.fetch(*block, {0, 600}, stream);
    const Pin back = rig.cache.fetch(*block, {300, 1000}, stream);
    const Pin inner = rig.cache.fetch(*block, {400, 500}, stream);
    EXPECT_EQ(rig.cache.stats(0).hits, 1U);
    const auto seen = rig.readOnDevice(stream, back.data(), 700);
    rig.sim.drain();
    EXPECT_EQ(*seen, part(value, {300, 1000}));
    rig.cache.validate(*block);
  });
}

TEST(Residency, DeviceAddressesKeepTheHostsRemainder) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 3000));
    Bytes foreign(3000);
    Block unaligned(foreign.data() + 13, 2900, BlockKind::Foreign, Born::Host, 0);
    for (const std::size_t begin : {0U, 1U, 255U, 256U, 257U, 1023U}) {
      for (Block* const from : {block.get(), &unaligned}) {
        const Pin pin = rig.cache.fetch(*from, {begin, begin + 10}, stream);
        const auto host = reinterpret_cast<std::uintptr_t>(from->data) + begin;
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pin.data()) % kAlignment, host % kAlignment);
      }
    }
    rig.cache.drain(false);
    rig.cache.forget(unaligned);
  });
}

TEST(Residency, AnEmptyExtentNeedsNothing) {
  Rig rig;
  const auto block = rig.newBlock(pattern(1, 10));
  const Pin pin = rig.cache.fetch(*block, {5, 5}, {});
  EXPECT_FALSE(pin);
  EXPECT_EQ(pin.data(), nullptr);
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U);
}

TEST(Residency, AnExtentPastTheEndIsRefused) {
  Rig rig;
  const auto block = rig.newBlock(pattern(1, 10));
  EXPECT_THROW(rig.cache.fetch(*block, {5, 11}, {}), Error);
  EXPECT_THROW(rig.cache.store(*block, {5, 11}, block->data, {}), Error);
  rig.cache.validate(*block);
}

// ---- versions

TEST(Residency, AWriteMakesTheNextFetchAMiss) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    rig.cache.fetch(*block, {0, 1000}, stream);
    rig.write(*block, pattern(2, 1000));
    EXPECT_TRUE(block->slots.empty());
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    EXPECT_EQ(rig.cache.stats(0).hits, 0U);
    const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(2, 1000));
  });
}

TEST(Residency, APinnedSlotKeepsTheBytesThatItWasFetchedWith) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    Pin old = rig.cache.fetch(*block, {0, 1000}, stream);
    rig.write(*block, pattern(2, 1000));
    const Pin now = rig.cache.fetch(*block, {0, 1000}, stream);
    EXPECT_NE(old.data(), now.data());
    const auto before = rig.readOnDevice(stream, old.data(), 1000);
    const auto after = rig.readOnDevice(stream, now.data(), 1000);
    rig.cache.validate(*block);
    old = Pin();
    EXPECT_EQ(block->slots.size(), 1U); // a stale Slot isn't kept once it is let go
    rig.cache.validate(*block);
    rig.sim.drain();
    EXPECT_EQ(*before, pattern(1, 1000));
    EXPECT_EQ(*after, pattern(2, 1000));
  });
}

// ---- what stays and what goes

TEST(Residency, TheSlotThatWasLetGoFirstGoesFirst) {
  CoreOptions options = ringOf(4096);
  options.cache.prefetch = false; // nothing is expected
  Rig rig(options);
  std::vector<Rig::BlockPtr> blocks;
  for (std::uint64_t i = 0; i < 5; ++i) {
    blocks.push_back(rig.newBlock(pattern(i, 1024)));
  }
  for (const std::size_t i : {0, 1, 2, 3}) {
    rig.cache.fetch(*blocks[i], {0, 1024}, {});
  }
  rig.cache.fetch(*blocks[0], {0, 1024}, {}); // used again: now 1 is the oldest
  rig.cache.fetch(*blocks[4], {0, 1024}, {});
  EXPECT_EQ(rig.cache.stats(0).evictions, 1U);
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 4096U);
  EXPECT_TRUE(blocks[1]->slots.empty());
  for (const std::size_t i : {0, 2, 3, 4}) {
    EXPECT_EQ(blocks[i]->slots.size(), 1U);
    rig.cache.validate(*blocks[i]);
  }
}

TEST(Residency, APinnedSlotStaysAndTheRingGrows) {
  Rig rig(ringOf(1024));
  const auto one = rig.newBlock(pattern(1, 1024));
  const auto two = rig.newBlock(pattern(2, 1024));
  const auto three = rig.newBlock(pattern(3, 1024));
  Pin first = rig.cache.fetch(*one, {0, 1024}, {});
  Pin second = rig.cache.fetch(*two, {0, 1024}, {});
  Pin third = rig.cache.fetch(*three, {0, 1024}, {});
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 3072U);
  EXPECT_EQ(rig.cache.stats(0).pinnedBytes, 3072U);
  EXPECT_EQ(std::memcmp(first.data(), pattern(1, 1024).data(), 1024), 0);
  first = Pin();
  second = Pin();
  third = rig.cache.fetch(*one, {0, 1024}, {});
  EXPECT_EQ(rig.cache.stats(0).hits, 1U);
  EXPECT_EQ(rig.cache.stats(0).pinnedBytes, 1024U);
  rig.cache.fetch(*one, {0, 512}, {});
  EXPECT_EQ(rig.cache.stats(0).slotBytesPeak, 3072U);
  rig.cache.resetPeaks(0);
  EXPECT_EQ(rig.cache.stats(0).slotBytesPeak, rig.cache.stats(0).slotBytes);
}

TEST(Residency, ASmallerRingGivesUpAtOnce) {
  Rig rig;
  const auto one = rig.newBlock(pattern(1, 1024));
  const auto two = rig.newBlock(pattern(2, 1024));
  rig.cache.fetch(*one, {0, 1024}, {});
  const Pin pin = rig.cache.fetch(*two, {0, 1024}, {});
  rig.cache.setRingBytes(512);
  EXPECT_EQ(rig.cache.ringBytes(), 512U);
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 1024U);
  EXPECT_EQ(rig.sim.bytesInUse(0), 1024U);
}

TEST(Residency, WhatALargeFetchTookOfTheDeviceGoesBackAfterAPassWithoutOne) {
  Rig rig(ringOf(1024));
  const auto small = rig.newBlock(pattern(1, 512));
  const auto other = rig.newBlock(pattern(2, 512));
  const auto large = rig.newBlock(pattern(3, 4096));
  const auto pass = [&](bool withLarge) {
    for (Block* block : {small.get(), other.get(), large.get()}) {
      if (block != large.get() || withLarge) rig.cache.fetch(*block, {0, block->bytes}, {});
    }
  };
  for (int k = 0; k < 3; ++k) pass(true);
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 5120U);
  EXPECT_EQ(rig.cache.stats(0).hits, 6U);
  for (int k = 0; k < 3; ++k) pass(false);
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 1024U);
  EXPECT_EQ(rig.cache.stats(0).hits, 12U);
}

TEST(Residency, EmptyCacheTellsWhatItGaveUp) {
  Rig rig;
  const auto one = rig.newBlock(pattern(1, 1024));
  const auto two = rig.newBlock(pattern(2, 1024));
  rig.cache.fetch(*one, {0, 1024}, {});
  const Pin pin = rig.cache.fetch(*two, {0, 1024}, {});
  EXPECT_EQ(rig.cache.emptyCache(0), 1024U);
  EXPECT_EQ(rig.cache.emptyCache(0), 0U);
  EXPECT_EQ(rig.sim.bytesInUse(0), 1024U);
}

TEST(Residency, CanGiveUpEverySlotAtItsLastUnpin) {
  CoreOptions options;
  options.cache.evictAtUnpin = true;
  options.cache.poison = true;
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto block = rig.newBlock(pattern(1, 1000));
        for (int repeat = 0; repeat < 3; ++repeat) {
          const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
          const Pin again = rig.cache.fetch(*block, {0, 1000}, stream);
          rig.readOnDevice(stream, again.data(), 1000);
        }
        EXPECT_EQ(rig.cache.stats(0).hits, 3U);
        EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U);
        EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
      },
      options);
}

TEST(Residency, MemoryIsReusedAfterItsReaders) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const Stream other = rig.sim.createStream(0);
        std::vector<std::pair<Bytes, std::shared_ptr<Bytes>>> read;
        for (std::uint64_t i = 0; i < 8; ++i) {
          const Bytes value = pattern(i, 1000);
          const auto block = rig.newBlock(value);
          Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
          rig.order(stream, other);
          pin.alsoUsedOn(other);
          pin.alsoUsedOn(other);
          read.emplace_back(value, rig.readOnDevice(other, pin.data(), 1000));
        }
        rig.sim.drain();
        for (const auto& [value, seen] : read) {
          EXPECT_EQ(*seen, value);
        }
      },
      ringOf(1024));
}

TEST(Residency, EveryPinOfASlotCounts) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const Stream other = rig.sim.createStream(0);
        const auto block = rig.newBlock(pattern(1, 1000));
        const auto next = rig.newBlock(pattern(2, 1000));
        {
          const Pin one = rig.cache.fetch(*block, {0, 1000}, stream);
          const Pin two = rig.cache.fetch(*block, {0, 1000}, other);
          rig.readOnDevice(stream, one.data(), 1000);
          rig.readOnDevice(other, two.data(), 1000);
        }
        rig.cache.emptyCache(0);
        rig.cache.fetch(*next, {0, 1000}, stream);
      },
      ringOf(1024));
}

TEST(Residency, ManyHitsKeepFewTokens) {
  Rig rig;
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  for (int repeat = 0; repeat < 2000; ++repeat) {
    rig.cache.fetch(*block, {0, 1000}, stream);
  }
  EXPECT_LE(block->slots.at(0)->readers.all().size(), 2U);
  for (std::size_t i = 0; i < 500; ++i) {
    rig.cache.fetch(*block, {i, i + 500}, stream);
    rig.cache.emptyCache(0);
  }
  EXPECT_LE(block->readers.all().size(), 2U);
}

TEST(Residency, ADeviceThatIsFullGivesUpWhatNothingPins) {
  CoreOptions options;
  options.sim.deviceBytes = 2048;
  Rig rig(options);
  const auto one = rig.newBlock(pattern(1, 1024));
  const auto two = rig.newBlock(pattern(2, 1024));
  const auto three = rig.newBlock(pattern(3, 2048));
  {
    const Pin pin = rig.cache.fetch(*one, {0, 1024}, {});
    rig.cache.fetch(*two, {0, 1024}, {});
    EXPECT_THROW(rig.cache.fetch(*three, {0, 2048}, {}), OutOfMemory);
    rig.cache.validate(*three);
    EXPECT_EQ(rig.cache.stats(0).slotBytes, 1024U);
  }
  const Pin pin = rig.cache.fetch(*three, {0, 2048}, {});
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 2048U);
  EXPECT_TRUE(one->slots.empty());
}

// ---- Blocks and Pins that go

TEST(Residency, APinOutlivesItsBlock) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Bytes value = pattern(1, 1000);
    auto block = rig.newBlock(value);
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    block.reset();
    const auto other = rig.newBlock(pattern(2, 1000)); // the host bytes anew, if the copy is done
    const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
    rig.sim.drain();
    EXPECT_EQ(*seen, value);
  });
}

TEST(Residency, AForgottenBlockHasItsCopiesToWaitFor) {
  SimOptions late;
  late.bias = SimBias::Late;
  Rig rig({late});
  const Stream stream = rig.sim.createStream(0);
  auto fetched = rig.newBlock(pattern(1, 1000));
  rig.cache.fetch(*fetched, {0, 1000}, stream);
  EXPECT_FALSE(rig.cache.forget(*fetched).empty());
  EXPECT_TRUE(fetched->slots.empty());
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U);
  rig.sim.drain();
  auto unused = rig.newBlock(1000);
  EXPECT_TRUE(rig.cache.forget(*unused).empty());
}

TEST(Residency, StreamsThatComeAndGoLeaveFewTokens) {
  for (const std::size_t budget : {0, 1 << 20}) { // so that the Slot passes, or stays
    CoreOptions options;
    options.cache.budgetBytes = budget;
    Rig rig(options);
    const auto block = rig.newBlock(pattern(1, 1000));
    for (std::uint64_t k = 1; k <= 1000; ++k) {
      Stream own = rig.sim.createStream(0);
      own.id = k;
      const Pin pin = rig.cache.fetch(*block, {0, 1000}, own);
      rig.sim.launch(own, [] {}, {{pin.data(), 1000}}, {});
      if (k % 50 == 0) rig.sim.drain();
      ASSERT_EQ(block->slots.size(), 1U);
      ASSERT_LE(block->slots[0]->readers.all().size(), 128U);
    }
    EXPECT_EQ(rig.cache.stats(0).hits, 999U);
    rig.cache.emptyCache(0);
    rig.sim.drain();
    EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
  }
}

TEST(Residency, APinMayBeMoved) {
  Rig rig;
  const auto block = rig.newBlock(pattern(1, 1000));
  Pin one = rig.cache.fetch(*block, {0, 1000}, {});
  const void* const data = one.data();
  Pin two = std::move(one);
  EXPECT_FALSE(one); // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(two.data(), data);
  one = std::move(two);
  EXPECT_EQ(one.data(), data);
  EXPECT_EQ(rig.cache.stats(0).pinnedBytes, 1000U);
  one = Pin();
  EXPECT_EQ(rig.cache.stats(0).pinnedBytes, 0U);
  one.alsoUsedOn({});
}

TEST(Residency, DrainWaitsForCopiesBothWays) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig({{.seed = seed, .bias = SimBias::Late}});
    const Stream stream = rig.sim.createStream(0);
    const auto fetched = rig.newBlock(pattern(1, 1000));
    const auto stored = rig.newBlock(1000);
    rig.cache.fetch(*fetched, {0, 1000}, stream);
    rig.cache.adopt(*stored, rig.newResult(stream, pattern(2, 1000)), stream);
    rig.cache.drain(false);
    // Without leases, which would wait by themselves.
    EXPECT_NO_THROW(rig.sim.hostAccess(fetched->data, 1000, Access::Write)) << "seed " << seed;
    EXPECT_NO_THROW(rig.sim.hostAccess(stored->data, 1000, Access::Read)) << "seed " << seed;
    EXPECT_EQ(std::memcmp(stored->data, pattern(2, 1000).data(), 1000), 0);
  }
}

TEST(Residency, AfterItsCloseNothingTouchesTheDevice) {
  Rig rig;
  rig.lost = true; // what is let go then stays where it is
  const Stream stream = rig.sim.createStream(0);
  auto block = rig.newBlock(pattern(1, 1000));
  auto other = rig.newBlock(pattern(2, 1000));
  Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
  rig.cache.fetch(*other, {0, 1000}, stream);
  rig.cache.drain(true);
  rig.link.fail(1, Failing::FromThenOn);
  pin = Pin();
  rig.cache.forget(*block);
  EXPECT_TRUE(block->slots.empty());
  block.reset();
  other.reset();
  EXPECT_EQ(rig.link.failures(), 0U);
  rig.link.fail(0);
  rig.cache.emptyCache(0); // finds Slots whose Blocks are gone
}

TEST(Residency, IsClosedThoughItsCopiesCouldNotBeWaitedFor) {
  Rig rig;
  rig.lost = true;
  const auto block = rig.newBlock(pattern(1, 1000));
  Pin pin = rig.cache.fetch(*block, {0, 1000}, rig.sim.createStream(0));
  rig.link.fail(1, Failing::FromThenOn);
  EXPECT_THROW(rig.cache.drain(true), Error);
  const std::uint64_t failures = rig.link.failures();
  pin = Pin();
  EXPECT_EQ(rig.link.failures(), failures); // nothing was asked of the device
  rig.link.fail(0);
}

// ---- capture

TEST(Residency, CopiesCanBeSlowedDown) {
  CoreOptions options;
  options.cache.copyDelay = std::chrono::microseconds(1);
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto block = rig.newBlock(pattern(1, 1000));
        rig.cache.fetch(*block, {0, 1000}, stream);
        rig.cache.adopt(*block, rig.newResult(stream, pattern(2, 1000)), stream);
        EXPECT_EQ(rig.read(*block), pattern(2, 1000));
      },
      options);
}

TEST(Residency, CountsTheBytesOfAllSlotsThatThereHaveBeen) {
  Rig rig;
  const auto block = rig.newBlock(pattern(1, 1000));
  for (std::size_t round = 1; round < 4; ++round) {
    (void)rig.cache.fetch(*block, {0, 512}, {});
    (void)rig.cache.fetch(*block, {0, 512}, {});
    EXPECT_EQ(rig.cache.stats(0).slotBytesEver, round * 512);
    rig.cache.emptyCache(0);
    rig.cache.resetPeaks(0);
    EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U);
  }
}

} // namespace
} // namespace offload
