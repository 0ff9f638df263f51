// Host access: what a HostLease waits for, and what it does to versions.
#include <thread>

#include "core/host_wait.h"
#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

TEST(HostLease, ToReadWaitsForTheCopyHome) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig({{.seed = seed}});
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    const DeviceBuffer result = rig.newResult(stream, pattern(2, 1000));
    rig.cache.store(*block, {0, 1000}, result.data, stream);
    EXPECT_EQ(rig.read(*block), pattern(2, 1000));
    EXPECT_NO_THROW(rig.sim.drain());
  }
}

TEST(HostLease, ToWriteWaitsForCopiesOutToo) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig({{.seed = seed}});
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
    ASSERT_NO_THROW(rig.write(*block, pattern(2, 1000))) << "seed " << seed;
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(1, 1000));
  }
}

TEST(HostLease, WhatAFailedAdoptionHasLeftDoesNotGoHomeUnderIt) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreOptions options{{.seed = seed, .bias = SimBias::Late}};
    options.cache.budgetBytes = 1 << 20;
    Rig rig(options);
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    {
      const HostLease lease = rig.cache.lease(*block, Access::Write);
      for (std::uint64_t call = 1; rig.cache.stats(0).dirtyBytes == 0; ++call) {
        ASSERT_LT(call, 20U);
        DeviceBuffer result = rig.newResult(stream, pattern(2, 1000));
        rig.link.fail(call);
        try {
          rig.cache.adopt(*block, std::move(result), stream);
        } catch (const Error&) {
        }
        rig.link.fail(0);
      }
      const auto sent = rig.cache.transferStats(0).bytesToHost;
      rig.cache.setBudget(0);
      EXPECT_EQ(rig.cache.transferStats(0).bytesToHost, sent);
      rig.sim.hostAccess(lease.data(), 1000, Access::Write);
      std::memcpy(lease.data(), pattern(3, 1000).data(), 1000);
    }
    rig.sim.drain();
    EXPECT_EQ(rig.read(*block), pattern(3, 1000)) << "seed " << seed;
  }
}

TEST(HostLease, ToReadDoesNotWaitForCopiesOut) {
  Rig rig({{.bias = SimBias::Late}});
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  rig.cache.fetch(*block, {0, 1000}, stream);
  rig.read(*block);
  EXPECT_EQ(block->readers.all().size(), 1U);
  rig.write(*block, pattern(2, 1000));
  EXPECT_TRUE(block->readers.empty());
}

TEST(HostLease, ToWriteBumpsTheVersionWhenItIsLetGo) {
  Rig rig;
  const auto block = rig.newBlock(1000);
  EXPECT_EQ(block->version, 0U);
  HostLease read = rig.cache.lease(*block, Access::Read);
  HostLease write = rig.cache.lease(*block, Access::Write);
  EXPECT_EQ(write.data(), block->data);
  EXPECT_EQ(block->leases, 2);
  EXPECT_EQ(block->version, 0U);
  write = HostLease();
  EXPECT_EQ(block->version, 1U);
  read = HostLease();
  EXPECT_EQ(block->version, 1U);
  EXPECT_EQ(block->hostVersion, 1U);
  EXPECT_EQ(block->leases, 0);
}

TEST(HostLease, MayBeMoved) {
  Rig rig;
  const auto block = rig.newBlock(1000);
  HostLease one = rig.cache.lease(*block, Access::Write);
  HostLease two = std::move(one);
  EXPECT_FALSE(one); // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(one.data(), nullptr);
  one = std::move(two);
  EXPECT_EQ(block->leases, 1);
  one = HostLease();
  EXPECT_EQ(block->leases, 0);
  EXPECT_EQ(block->version, 1U);
}

TEST(HostLease, ChangesUnderOneThatReadsCanBeTold) {
  Rig rig;
  const auto block = rig.newBlock(pattern(1, 1000));
  rig.cache.fetch(*block, {0, 1000}, {});
  const HostLease lease = rig.cache.lease(*block, Access::Read);
  std::memset(lease.data(), 7, 1000);
  rig.cache.markWritten(*block);
  const Pin pin = rig.cache.fetch(*block, {0, 1000}, {});
  EXPECT_EQ(rig.cache.stats(0).hits, 0U);
  EXPECT_EQ(std::memcmp(pin.data(), Bytes(1000, 7).data(), 1000), 0);
}

TEST(HostLease, WhileItIsHeldNoCopyIsLeftInFlight) {
  Rig rig({{.bias = SimBias::Late}});
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  const HostLease lease = rig.cache.lease(*block, Access::Read);
  const auto expect = [&](const Bytes& value) {
    EXPECT_NO_THROW(rig.sim.hostAccess(lease.data(), 1000, Access::Read));
    EXPECT_EQ(std::memcmp(lease.data(), value.data(), 1000), 0);
  };
  const DeviceBuffer result = rig.newResult(stream, pattern(2, 1000));
  rig.cache.store(*block, {0, 1000}, result.data, stream);
  expect(pattern(2, 1000));
  rig.cache.adopt(*block, rig.newResult(stream, pattern(3, 1000)), stream);
  expect(pattern(3, 1000));
}

TEST(HostLease, OneThatCanNotBeHadIsNotHeld) {
  Rig rig({{.bias = SimBias::Late}});
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  rig.cache.fetch(*block, {0, 1000}, stream);
  rig.link.fail(1);
  EXPECT_THROW(rig.cache.lease(*block, Access::Write), Error);
  EXPECT_EQ(block->leases, 0);
  rig.write(*block, pattern(2, 1000));
  EXPECT_EQ(rig.read(*block), pattern(2, 1000));
}

TEST(HostLease, WaitsWithinTheScopeThatWasSet) {
  static int waits = 0;
  waits = 0;
  setHostWaitScope([](const std::function<void()>& wait) {
    ++waits;
    wait();
  });
  {
    Rig rig({{.bias = SimBias::Late}});
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    for (int repeat = 0; repeat < 50; ++repeat) { // asking may find it done
      rig.cache.fetch(*block, {0, 1000}, stream);
      rig.write(*block, pattern(2, 1000));
    }
  }
  setHostWaitScope(nullptr);
  EXPECT_GT(waits, 0);
}

/// Holds a copy back, as a driver's full queue does, so that another thread can come in between.
class SlowLink final : public FaultLink {
 public:
  using FaultLink::FaultLink;
  void copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    enqueueing = true;
    for (int i = 0; i < 50 && hold; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    FaultLink::copyToHost(host, device, bytes, stream);
  }
  std::atomic<bool> hold{true};
  std::atomic<bool> enqueueing{false};
};

/// Another thread's access while a result is being sent home must see the new bytes, whatever the access is.
template <class Send, class Use>
void expectUseAfter(Send send, Use use) {
  CoreOptions options;
  options.sim.devices = 2;
  BasicRig<SlowLink> rig(options);
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  const DeviceBuffer result = rig.newResult(stream, pattern(2, 1000));
  std::thread sender([&] { send(rig, *block, result, stream); });
  while (!rig.link.enqueueing) {
    std::this_thread::yield();
  }
  use(rig, *block);
  sender.join();
  rig.sim.drain();
}

TEST(HostLease, WaitsForAnotherThreadThatIsEnqueueing) {
  const auto read = [](auto& rig, Block& block) { EXPECT_EQ(rig.read(block), pattern(2, 1000)); };
  expectUseAfter(
      [](auto& rig, Block& block, const DeviceBuffer& result, Stream stream) {
        rig.cache.store(block, {0, 1000}, result.data, stream);
      },
      read);
  expectUseAfter(
      [](auto& rig, Block& block, const DeviceBuffer& result, Stream stream) { rig.cache.adopt(block, result, stream); }, read);
}

TEST(HostLease, AFetchWaitsForAnotherThreadThatIsEnqueueing) {
  for (const int device : {0, 1}) {
    const auto fetch = [device](auto& rig, Block& block) {
      const Stream stream = rig.sim.createStream(device);
      const Pin pin = rig.cache.fetch(block, {0, 1000}, stream);
      const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
      rig.sim.drain();
      EXPECT_EQ(*seen, pattern(2, 1000));
    };
    expectUseAfter(
        [](auto& rig, Block& block, const DeviceBuffer& result, Stream stream) { rig.cache.adopt(block, result, stream); },
        fetch);
  }
}

} // namespace
} // namespace offload
