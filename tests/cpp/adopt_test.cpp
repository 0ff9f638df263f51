// Results that come home: device memory that is handed over, and bytes that are copied from what somebody else owns.
#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

template <class Body>
void onEverySeed(Body body) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig({{.seed = seed}});
    ASSERT_NO_THROW(body(rig, rig.sim.createStream(0))) << "seed " << seed;
    rig.cache.emptyCache(0);
    ASSERT_EQ(rig.owned, 0) << "seed " << seed;
    ASSERT_EQ(rig.sim.bytesInUse(0), 0U) << "seed " << seed;
    ASSERT_NO_THROW(rig.sim.drain()) << "seed " << seed;
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

/// A result of these bytes whose copy into an extent of the block is on its way; whoever drops it frees the memory.
DeviceBuffer storeResult(Rig& rig, Block& block, Extent extent, const Bytes& bytes, Stream producer) {
  DeviceBuffer result = rig.newResult(producer, bytes);
  rig.cache.store(block, extent, result.data, producer);
  return result;
}

TEST(Adopt, TheBytesComeHome) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(1000);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
    EXPECT_EQ(rig.read(*block), pattern(1, 1000));
    EXPECT_EQ(block->version, 1U);
    EXPECT_EQ(block->hostVersion, 1U);
  });
}

TEST(Adopt, AnEmptyResultLeavesNothing) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(0);
    rig.cache.adopt(*block, rig.newResult(stream, {}), stream);
    rig.cache.adopt(*block, {nullptr, 0, stream, nullptr}, stream);
    EXPECT_EQ(rig.owned, 0);
    EXPECT_EQ(rig.read(*block), Bytes());
    // Memory that is larger than its value.
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
    EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U);
    EXPECT_EQ(rig.owned, 0);
  });
}

TEST(Adopt, AFetchFindsThemOnTheDevice) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Stream other = rig.sim.createStream(0);
    const auto block = rig.newBlock(1000);
    DeviceBuffer result = rig.newResult(stream, pattern(1, 1000));
    auto* const data = static_cast<std::byte*>(result.data);
    rig.cache.adopt(*block, std::move(result), stream);
    const Pin pin = rig.cache.fetch(*block, {100, 1000}, other);
    EXPECT_EQ(pin.data(), data + 100);
    EXPECT_EQ(rig.cache.transferStats(0).copiesToDevice, 0U);
    EXPECT_EQ(rig.cache.transferStats(0).bytesToHost, 1000U);
    const auto seen = rig.readOnDevice(other, pin.data(), 900);
    rig.sim.drain();
    EXPECT_EQ(std::memcmp(seen->data(), pattern(1, 1000).data() + 100, 900), 0);
  });
}

TEST(Adopt, TheMemoryIsReleasedOnceAfterTheCopyHomeAndItsReaders) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Stream other = rig.sim.createStream(0);
    const auto block = rig.newBlock(1000);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
    {
      const Pin pin = rig.cache.fetch(*block, {0, 1000}, other);
      rig.readOnDevice(other, pin.data(), 1000);
    }
    EXPECT_EQ(rig.owned, 1);
    EXPECT_EQ(rig.cache.emptyCache(0), 1000U); // the simulation reports a free that comes too early
    EXPECT_EQ(rig.owned, 0);
    const DeviceBuffer next = rig.newResult(stream, pattern(2, 1000));
    EXPECT_EQ(rig.read(*block), pattern(1, 1000));
  });
}

class EventCounts final : public FaultLink {
 public:
  using FaultLink::FaultLink;
  void record(Event event, Stream stream) override {
    ++records;
    FaultLink::record(event, stream);
  }
  bool query(Event event) override {
    ++queries;
    return FaultLink::query(event);
  }
  int records = 0;
  int queries = 0;
};

TEST(Adopt, AUseOnTheStreamThatMadeItTakesNoEvent) {
  CoreOptions options;
  options.cache.budgetBytes = 4096; // what is made stays
  BasicRig<EventCounts> rig(options);
  const Stream stream = rig.sim.createStream(0);
  const Stream other = rig.sim.createStream(0);
  const auto block = rig.newBlock(1000);
  rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
  EXPECT_EQ(rig.link.records, 1);
  for (int use = 0; use < 3; ++use) {
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    rig.readOnDevice(stream, pin.data(), 1000);
  }
  EXPECT_EQ(rig.link.records, 1);
  EXPECT_EQ(rig.link.queries, 0);
  {
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, other);
    rig.readOnDevice(other, pin.data(), 1000);
  }
  EXPECT_EQ(rig.link.records, 2) << "another stream's use is waited for";
  EXPECT_EQ(rig.cache.emptyCache(0), 1000U);
  EXPECT_EQ(rig.read(*block), pattern(1, 1000));
}

TEST(Adopt, AUseOnAStreamThatMayBeGoneTakesAnEventAtOnce) {
  CoreOptions options;
  options.cache.budgetBytes = 4096;
  BasicRig<EventCounts> rig(options);
  Stream stream = rig.sim.createStream(0);
  stream.id = 1;
  const auto block = rig.newBlock(1000);
  rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
  EXPECT_EQ(rig.link.records, 1);
  (void)rig.cache.fetch(*block, {0, 1000}, stream);
  EXPECT_EQ(rig.link.records, 2);
  EXPECT_EQ(rig.read(*block), pattern(1, 1000));
}

TEST(Adopt, APartOfWhatIsHeldComesHome) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(1000);
    block->goesHome = true;
    Bytes bytes = pattern(1, 3000);
    DeviceBuffer result = rig.newResult(stream, bytes);
    result.data = static_cast<std::byte*>(result.data) + 512;
    rig.cache.adopt(*block, std::move(result), stream);
    EXPECT_EQ(rig.cache.stats(0).slotBytes, 3000U);
    EXPECT_EQ(rig.cache.transferStats(0).bytesToHost, 1000U);
    const Bytes part(bytes.begin() + 512, bytes.begin() + 1512);
    {
      const Pin pin = rig.cache.fetch(*block, {256, 1000}, stream);
      const auto seen = rig.readOnDevice(stream, pin.data(), 744);
      rig.sim.drain();
      EXPECT_EQ(std::memcmp(seen->data(), part.data() + 256, 744), 0);
    }
    EXPECT_EQ(rig.cache.emptyCache(0), 3000U);
    EXPECT_EQ(rig.read(*block), part);
  });
}

TEST(Adopt, WhatIsLeavingIsGivenUpOldestFirst) {
  onEverySeed([](Rig& rig, Stream stream) {
    rig.cache.setBudget(1000);
    std::vector<decltype(rig.newBlock(0))> blocks;
    for (int i = 0; i < 5; ++i) {
      blocks.push_back(rig.newBlock(1000, Born::Device));
      blocks.back()->purpose = i != 3 ? Purpose::Activation : Purpose::Gradient; // which others want to find
      blocks.back()->goesHome = i != 1; // which stays on the device as Dirty
      rig.cache.adopt(*blocks.back(), rig.newResult(stream, pattern(i, 1000)), stream);
    }
    const Pin pin = rig.cache.fetch(*blocks[0], {0, 1000}, stream);
    EXPECT_EQ(rig.owned, 5);
    rig.cache.giveUpLeaving(0, Purpose::Activation, 2000);
    EXPECT_EQ(rig.owned, 5);
    rig.cache.giveUpLeaving(0, Purpose::Activation, 1999);
    EXPECT_EQ(rig.owned, 4);
    EXPECT_TRUE(blocks[2]->slots.empty());
    rig.cache.giveUpLeaving(0, Purpose::Activation, 0);
    EXPECT_EQ(rig.owned, 3);
    EXPECT_FALSE(blocks[3]->slots.empty());
    for (int i = 0; i < 5; ++i) EXPECT_EQ(rig.read(*blocks[static_cast<std::size_t>(i)]), pattern(i, 1000));
  });
}

// Without a budget, where all else goes home at once.
TEST(Adopt, WhatIsOnlyToBeAddedToAGradientStaysUntilThatIsDone) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto home = [&rig] { return rig.cache.transferStats(0).bytesToHost; };
    const auto gradient = rig.newBlock(1000, Born::Device);
    gradient->purpose = Purpose::Gradient;
    gradient->derivedFrom = &rig; // a name
    const auto newAddend = [&rig] {
      auto block = rig.newBlock(1000, Born::Device);
      block->derivedFrom = &rig;
      return block;
    };
    rig.cache.adopt(*gradient, rig.newResult(stream, pattern(1, 1000)), stream);
    EXPECT_EQ(home(), 1000U);
    auto first = newAddend();
    rig.cache.adopt(*first, rig.newResult(stream, pattern(2, 1000)), stream);
    {
      const auto hits = rig.cache.stats(0).hits;
      const Pin pin = rig.cache.fetch(*first, {0, 1000}, stream);
      EXPECT_EQ(rig.cache.stats(0).hits, hits + 1);
      const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
      rig.sim.drain();
      EXPECT_EQ(*seen, pattern(2, 1000));
    }
    EXPECT_EQ(home(), 1000U);
    rig.cache.adopt(*gradient, rig.newResult(stream, pattern(3, 1000)), stream);
    EXPECT_EQ(home(), 2000U);
    const auto other = rig.newBlock(1000, Born::Device); // which goes although it is the newer one
    rig.cache.adopt(*other, rig.newResult(stream, pattern(6, 1000)), stream);
    EXPECT_EQ(home(), 3000U);
    EXPECT_EQ(other->hostVersion, other->version);
    first = nullptr;
    EXPECT_EQ(home(), 3000U);

    first = newAddend();
    rig.cache.adopt(*first, rig.newResult(stream, pattern(4, 1000)), stream);
    const auto second = newAddend();
    rig.cache.adopt(*second, rig.newResult(stream, pattern(5, 1000)), stream);
    EXPECT_EQ(home(), 4000U); // there is one of them at a time
    EXPECT_EQ(rig.cache.stats(0).dirtyBytes, 1000U);
    rig.cache.emptyCache(0);
    EXPECT_EQ(home(), 5000U);
    EXPECT_EQ(rig.read(*other), pattern(6, 1000));
    EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U);
    EXPECT_EQ(rig.read(*gradient), pattern(3, 1000));
    EXPECT_EQ(rig.read(*first), pattern(4, 1000));
    EXPECT_EQ(rig.read(*second), pattern(5, 1000));
  });
}

TEST(Adopt, MemoryOfTheLinkIsFreedOnItsHomeStream) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Stream producer = rig.sim.createStream(0);
    const auto block = rig.newBlock(1000);
    DeviceBuffer buffer{rig.sim.allocate(1000, stream), 1000, stream, nullptr};
    rig.order(stream, producer);
    rig.writeOnDevice(producer, buffer.data, pattern(1, 1000));
    rig.cache.adopt(*block, std::move(buffer), producer);
    EXPECT_EQ(rig.cache.emptyCache(0), 1000U);
    EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
    EXPECT_EQ(rig.read(*block), pattern(1, 1000));
  });
}

TEST(Adopt, ReplacesWhatWasThere) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    Pin old = rig.cache.fetch(*block, {0, 1000}, stream);
    rig.cache.fetch(*block, {0, 500}, stream);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(2, 1000)), stream);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(3, 1000)), stream);
    rig.cache.validate(*block);
    const auto before = rig.readOnDevice(stream, old.data(), 1000);
    const Pin now = rig.cache.fetch(*block, {0, 500}, stream);
    const auto after = rig.readOnDevice(stream, now.data(), 500);
    EXPECT_EQ(rig.read(*block), pattern(3, 1000));
    rig.sim.drain();
    EXPECT_EQ(*before, pattern(1, 1000));
    EXPECT_EQ(std::memcmp(after->data(), pattern(3, 1000).data(), 500), 0);
    old = Pin();
    rig.cache.validate(*block);
  });
}

TEST(Adopt, CountsAgainstTheRing) {
  CoreOptions options;
  options.cache.ringBytes = 2048;
  Rig rig(options);
  std::vector<Rig::BlockPtr> blocks;
  for (std::uint64_t i = 0; i < 4; ++i) {
    blocks.push_back(rig.newBlock(1024));
    rig.cache.adopt(*blocks[i], rig.newResult({}, pattern(i, 1024)), {});
  }
  EXPECT_EQ(rig.cache.stats(0).slotBytes, 2048U);
  EXPECT_EQ(rig.owned, 2);
  for (std::uint64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(rig.read(*blocks[i]), pattern(i, 1024));
  }
}

TEST(Adopt, ABlockMayGoWhileItsBytesAreOnTheirWayHome) {
  onEverySeed([](Rig& rig, Stream stream) {
    for (std::uint64_t i = 0; i < 5; ++i) {
      const auto block = rig.newBlock(1000);
      rig.cache.adopt(*block, rig.newResult(stream, pattern(i, 1000)), stream);
    }
    EXPECT_EQ(rig.owned, 0);
    const auto block = rig.newBlock(pattern(9, 1000));
    EXPECT_EQ(rig.read(*block), pattern(9, 1000));
  });
}

TEST(Store, CopiesHomeBeforeTheSourceIsOverwritten) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    {
      const DeviceBuffer result = storeResult(rig, *block, {0, 1000}, pattern(2, 1000), stream);
      rig.writeOnDevice(stream, result.data, pattern(3, 1000));
    }
    EXPECT_EQ(rig.read(*block), pattern(2, 1000));
  });
}

TEST(Store, OfAPartLeavesTheRest) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    const DeviceBuffer result = storeResult(rig, *block, {300, 400}, pattern(2, 100), stream);
    Bytes expected = pattern(1, 1000);
    const Bytes stored = pattern(2, 100);
    std::copy(stored.begin(), stored.end(), expected.begin() + 300);
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
    EXPECT_EQ(rig.read(*block), expected);
    rig.sim.drain();
    EXPECT_EQ(*seen, expected);
  });
}

TEST(Store, ComesAfterCopiesOutAndMakesSlotsStale) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Stream other = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    const Pin old = rig.cache.fetch(*block, {0, 1000}, other);
    const auto before = rig.readOnDevice(other, old.data(), 1000);
    const DeviceBuffer result = storeResult(rig, *block, {0, 1000}, pattern(2, 1000), stream);
    const Pin now = rig.cache.fetch(*block, {0, 1000}, other);
    EXPECT_EQ(rig.cache.stats(0).hits, 0U);
    const auto after = rig.readOnDevice(other, now.data(), 1000);
    rig.sim.drain();
    EXPECT_EQ(*before, pattern(1, 1000));
    EXPECT_EQ(*after, pattern(2, 1000));
  });
}

TEST(Store, StoresFromSeveralStreamsKeepTheirOrder) {
  onEverySeed([](Rig& rig, Stream stream) {
    const Stream other = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    for (std::uint64_t i = 2; i < 6; ++i) {
      const Stream producer = i % 2 == 0 ? stream : other;
      storeResult(rig, *block, {0, 1000}, pattern(i, 1000), producer);
    }
    EXPECT_EQ(rig.read(*block), pattern(5, 1000));
  });
}

// As by a kernel that the glue doesn't see through, a launch of Triton's.
TEST(Adopt, WhatIsChangedWhereItWasMadeIsFoundThere) {
  CoreOptions options;
  options.cache.budgetBytes = 16'000;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    options.sim.seed = seed;
    Rig rig(options);
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(1000);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
    {
      const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
      rig.writeOnDevice(stream, pin.data(), pattern(2, 1000));
      rig.cache.bringHome(pin, stream);
    }
    rig.cache.validate();
    const Pin again = rig.cache.fetch(*block, {0, 1000}, rig.sim.createStream(0));
    EXPECT_EQ(rig.cache.stats(0).hits, 2U);
    EXPECT_EQ(rig.cache.transferStats(0).bytesToDevice, 0U);
    EXPECT_EQ(rig.read(*block), pattern(2, 1000));
    rig.sim.drain();
    EXPECT_EQ(std::memcmp(again.data(), pattern(2, 1000).data(), 1000), 0);
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

TEST(Adopt, WhatNobodyElseCanSeeIsGivenBack) {
  CoreOptions options;
  options.cache.budgetBytes = 16'000;
  Rig rig(options);
  const Stream stream = rig.sim.createStream(0);
  const Stream other = rig.sim.createStream(0);
  const auto fetched = [&](Stream on) {
    auto block = rig.newBlock(1000);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
    return std::pair(rig.cache.fetch(*block, {0, 1000}, on), std::move(block));
  };
  {
    auto [pin, block] = fetched(stream);
    EXPECT_EQ(rig.cache.takeBack(pin, stream), nullptr) << "its Block has it";
    block = nullptr;
    void* const data = pin.data();
    auto owner = rig.cache.takeBack(pin, stream);
    EXPECT_EQ(owner.get(), data);
    EXPECT_FALSE(pin);
    EXPECT_EQ(rig.cache.stats(0).slotBytes, 0U) << "it is on nobody's account any more";
    rig.writeOnDevice(stream, data, pattern(2, 1000));
    rig.sim.drain();
  }
  EXPECT_EQ(rig.owned, 0);
  {
    auto [pin, block] = fetched(other);
    block = nullptr;
    EXPECT_EQ(rig.cache.takeBack(pin, other), nullptr) << "its memory is of another stream";
    EXPECT_EQ(rig.cache.takeBack(pin, stream), nullptr) << "it is used on another stream";
    EXPECT_TRUE(pin);
  }
  {
    auto [pin, block] = fetched(stream);
    const Pin second = rig.cache.fetch(*block, {0, 1000}, stream);
    block = nullptr;
    EXPECT_EQ(rig.cache.takeBack(pin, stream), nullptr) << "there is another Pin";
  }
  {
    auto [pin, block] = fetched(stream);
    {
      const Pin second = rig.cache.fetch(*block, {0, 1000}, other);
      rig.readOnDevice(other, second.data(), 1000);
    }
    block = nullptr;
    EXPECT_EQ(rig.cache.takeBack(pin, stream), nullptr) << "another stream may be reading it still";
    EXPECT_TRUE(pin);
  }
  {
    const auto block = rig.newBlock(pattern(3, 1000));
    Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    EXPECT_EQ(rig.cache.takeBack(pin, stream), nullptr) << "a copy of host bytes";
  }
  rig.cache.validate();
}

} // namespace
} // namespace offload
