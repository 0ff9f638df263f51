// Kernels that read host bytes where they are: what they come after, and what waits for them.
#include "residency_rig.h"

namespace offload {
namespace {

using namespace core_test;

/// What a kernel under a lease reads of all of a Block.
std::shared_ptr<Bytes> readUnderLease(Rig& rig, Block& block, Stream stream) {
  const DeviceLease lease = rig.cache.leaseToDevice(block, {0, block.bytes}, stream, block.bytes);
  if (!lease) return nullptr;
  return rig.readOnDevice(stream, lease.data(), block.bytes);
}

TEST(DeviceLease, ReadsTheBytesWithoutACopy) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    const DeviceLease lease = rig.cache.leaseToDevice(*block, {100, 300}, stream, 50);
    ASSERT_TRUE(lease);
    EXPECT_EQ(lease.data(), static_cast<std::byte*>(block->data) + 100);
    const auto seen = rig.readOnDevice(stream, lease.data(), 200);
    rig.sim.drain();
    const Bytes all = pattern(1, 1000);
    EXPECT_EQ(*seen, Bytes(all.begin() + 100, all.begin() + 300));
    EXPECT_EQ(rig.cache.transferStats(0).bytesToDevice, 0U);
    EXPECT_EQ(rig.cache.stats(0).fetches, 0U);
    EXPECT_EQ(rig.cache.stats(0).readsInPlace, 1U);
    EXPECT_EQ(rig.cache.stats(0).bytesReadInPlace, 50U);
  });
}

TEST(DeviceLease, ADrainWaitsForTheKernel) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto block = rig.newBlock(pattern(1, 1000));
        const auto seen = readUnderLease(rig, *block, stream);
        EXPECT_EQ(*seen, Bytes(1000, 0));
        rig.cache.drain(false);
        EXPECT_EQ(*seen, pattern(1, 1000));
      },
      {.sim = {.bias = SimBias::Late}});
}

TEST(DeviceLease, AWriteWaitsForTheKernel) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    const auto seen = readUnderLease(rig, *block, stream);
    ASSERT_NO_THROW(rig.write(*block, pattern(2, 1000)));
    EXPECT_EQ(*seen, pattern(1, 1000));
  });
}

TEST(DeviceLease, ACopyHomeWaitsForTheKernel) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    const auto seen = readUnderLease(rig, *block, stream);
    const Stream producer = rig.sim.createStream(0);
    const DeviceBuffer result = rig.newResult(producer, pattern(2, 1000));
    rig.cache.store(*block, {0, 1000}, result.data, producer);
    EXPECT_EQ(rig.read(*block), pattern(2, 1000));
    EXPECT_EQ(*seen, pattern(1, 1000));
  });
}

TEST(DeviceLease, TheMemoryOfABlockThatIsGoneWaitsForTheKernel) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto seen = readUnderLease(rig, *rig.newBlock(pattern(1, 1000)), stream);
    for (int more = 0; more < 4; ++more) rig.newBlock(pattern(2, 1000));
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(1, 1000));
  });
}

TEST(DeviceLease, ComesAfterACopyHome) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    const Stream producer = rig.sim.createStream(0);
    const DeviceBuffer result = rig.newResult(producer, pattern(2, 1000));
    rig.cache.store(*block, {0, 1000}, result.data, producer);
    const auto seen = readUnderLease(rig, *block, stream);
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(2, 1000));
  });
}

TEST(DeviceLease, ComesAfterAJob) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, 1000));
    rig.cache.runLater({{block.get(), Access::Write}}, [&rig, data = block->data] {
      rig.sim.hostAccess(data, 1000, Access::Write);
      std::memcpy(data, pattern(2, 1000).data(), 1000);
    });
    const auto seen = readUnderLease(rig, *block, stream);
    rig.cache.runLater({{block.get(), Access::Write}}, [&rig, data = block->data] {
      rig.sim.hostAccess(data, 1000, Access::Write);
      std::memcpy(data, pattern(3, 1000).data(), 1000);
    });
    EXPECT_EQ(rig.read(*block), pattern(3, 1000));
    EXPECT_EQ(*seen, pattern(2, 1000));
  });
}

TEST(DeviceLease, IsNotGivenWhereTheDeviceHasTheNewestBytes) {
  CoreOptions options;
  options.sim.devices = 2;
  options.cache.budgetBytes = 1 << 20;
  Rig rig(options);
  const auto block = rig.newBlock(pattern(1, 1000));
  rig.cache.fetch(*block, {0, 1000}, {});
  EXPECT_FALSE(rig.cache.leaseToDevice(*block, {100, 200}, {}, 100));
  EXPECT_TRUE(rig.cache.leaseToDevice(*block, {100, 200}, {.device = 1}, 100)); // it isn't newer there
  rig.write(*block, pattern(2, 1000));
  EXPECT_TRUE(rig.cache.leaseToDevice(*block, {100, 200}, {}, 100));
  rig.cache.adopt(*block, rig.newResult({}, pattern(3, 1000)), {});
  EXPECT_FALSE(rig.cache.leaseToDevice(*block, {100, 200}, {}, 100));
  EXPECT_FALSE(rig.cache.leaseToDevice(*block, {100, 200}, {.device = 1}, 100));
  EXPECT_EQ(rig.cache.stats(0).readsInPlace, 1U);
  EXPECT_EQ(rig.cache.stats(1).readsInPlace, 1U);
}

TEST(DeviceLease, IsNotGivenOfMemoryThatTheDeviceCanNotRead) {
  Rig rig;
  const auto block = rig.newBlock(1000, Born::Host, false);
  EXPECT_FALSE(rig.cache.leaseToDevice(*block, {0, 1000}, {}, 1));
  const auto locked = rig.newBlock(1000);
  EXPECT_FALSE(rig.cache.leaseToDevice(*locked, {0, 0}, {}, 0));
  EXPECT_THROW(rig.cache.leaseToDevice(*locked, {0, 1001}, {}, 1), Error);
  EXPECT_EQ(rig.cache.stats(0).readsInPlace, 0U);
}

class Special final : public FaultLink {
 public:
  using FaultLink::FaultLink;
  std::uint64_t captureOf(Stream /*stream*/) override {
    return captures ? 7 : 0;
  }
  bool readsHostMemory(int /*device*/) override {
    return reads;
  }
  bool captures = false;
  bool reads = true;
};

TEST(DeviceLease, IsNotGivenInACaptureOrOnAnotherKindOfDevice) {
  BasicRig<Special> rig;
  const auto block = rig.newBlock(pattern(1, 1000));
  rig.link.captures = true;
  EXPECT_FALSE(rig.cache.leaseToDevice(*block, {0, 1000}, {}, 1));
  rig.link.captures = false;
  rig.link.reads = false;
  EXPECT_FALSE(rig.cache.leaseToDevice(*block, {0, 1000}, {}, 1));
  rig.link.reads = true;
  EXPECT_TRUE(rig.cache.leaseToDevice(*block, {0, 1000}, {}, 1));
}

TEST(DeviceLease, StreamsThatComeAndGoLeaveFewTokens) {
  Rig rig;
  const auto block = rig.newBlock(pattern(1, 1000));
  for (std::uint64_t stream = 1; stream <= 1000; ++stream) {
    Stream own = rig.sim.createStream(0);
    own.id = stream;
    ASSERT_NE(readUnderLease(rig, *block, own), nullptr);
    if (stream % 50 == 0) rig.sim.drain();
    ASSERT_LE(block->readers.all().size(), 128U);
  }
  rig.write(*block, pattern(2, 1000));
  EXPECT_TRUE(block->readers.empty());
}

TEST(DeviceLease, TheBudgetIsLookedForNowAndThen) {
  CoreOptions options;
  options.cache.budgetBytes = std::nullopt;
  options.cache.lookInterval = std::chrono::microseconds(0);
  options.cache.headroomBytes = 0;
  options.sim.deviceBytes = 1 << 20;
  Rig rig(options);
  void* const others = rig.sim.allocate(1 << 19, {});
  const auto block = rig.newBlock(pattern(1, 1000));
  readUnderLease(rig, *block, {});
  EXPECT_LE(rig.cache.budget(0), std::size_t{1} << 19);
  rig.sim.free(others, {});
  rig.sim.drain();
  for (int more = 0; more < 128; ++more) readUnderLease(rig, *block, {});
  EXPECT_GT(rig.cache.budget(0), std::size_t{1} << 19);
}

TEST(DeviceLease, MayBeMoved) {
  Rig rig({{.bias = SimBias::Late}});
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  DeviceLease one = rig.cache.leaseToDevice(*block, {0, 1000}, stream, 1);
  DeviceLease two = std::move(one);
  EXPECT_FALSE(one); // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(one.data(), nullptr);
  EXPECT_TRUE(block->readers.empty());
  two = DeviceLease();
  EXPECT_EQ(block->readers.all().size(), 1U);
}

TEST(DeviceLease, WhereACallFailsNothingIsLostAndTheNextOneWorks) {
  for (std::uint64_t call = 1;; ++call) {
    Rig rig({{.bias = SimBias::Late}});
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    const DeviceBuffer result = rig.newResult(stream, pattern(2, 1000));
    rig.cache.store(*block, {0, 1000}, result.data, stream);
    const Stream other = rig.sim.createStream(0);
    rig.link.fail(call);
    std::shared_ptr<Bytes> seen;
    try {
      seen = readUnderLease(rig, *block, other);
    } catch (const Error&) {
    }
    const bool failed = rig.link.failures() > 0;
    rig.link.fail(0);
    rig.write(*block, pattern(3, 1000));
    if (seen) {
      EXPECT_EQ(*seen, pattern(2, 1000)) << call;
    }
    EXPECT_EQ(rig.read(*block), pattern(3, 1000)) << call;
    rig.sim.drain();
    if (!failed) {
      EXPECT_TRUE(seen);
      EXPECT_GT(call, 2U); // the order and the token are calls of the link
      return;
    }
  }
}

} // namespace
} // namespace offload
