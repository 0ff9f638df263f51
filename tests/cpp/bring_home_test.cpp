// What changes fetched bytes in place, and the rest of the cache meanwhile.
#include <chrono>
#include <future>
#include <thread>

#include "residency_rig.h"

namespace offload {
namespace {

using namespace core_test;

// The copy home of a result is nobody's whom the user could wait for.
TEST(BringHome, WhatIsOnItsWayHomeIsNotChangedUnderItsCopy) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig({{.seed = seed}});
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(1000);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream); // goes home at once
    {
      const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
      rig.cache.beforeChange(pin, stream);
      rig.writeOnDevice(stream, pin.data(), pattern(2, 1000));
      rig.cache.bringHome(pin, stream);
    }
    EXPECT_EQ(rig.read(*block), pattern(2, 1000));
    ASSERT_NO_THROW(rig.sim.drain()) << "seed " << seed;
    ASSERT_EQ(rig.sim.reports(), std::vector<std::string>()) << "seed " << seed;
  }
}

TEST(BringHome, WhatIsOnTheDeviceAloneStaysThere) {
  CoreOptions options;
  options.cache.budgetBytes = 4000;
  Rig rig(options);
  const Stream stream = rig.sim.createStream(0);
  const Stream other = rig.sim.createStream(0);
  const auto block = rig.newBlock(1000);
  rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
  {
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    rig.cache.beforeChange(pin, stream);
    rig.writeOnDevice(stream, pin.data(), pattern(2, 1000));
    rig.cache.bringHome(pin, stream);
  }
  EXPECT_EQ(rig.cache.transferStats(0).copiesToHost, 0U);
  {
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, other);
    const auto seen = rig.readOnDevice(other, pin.data(), 1000);
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(2, 1000));
  }
  EXPECT_EQ(rig.read(*block), pattern(2, 1000));
  EXPECT_EQ(rig.cache.transferStats(0).copiesToHost, 1U);
  EXPECT_EQ(rig.sim.reports(), std::vector<std::string>());
}

TEST(BringHome, WhatMayBeChangedDoesNotMakeRoom) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreOptions options{{.seed = seed}};
    options.cache.budgetBytes = 1500;
    options.cache.chunkBytes = 150;
    Rig rig(options);
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(1000, Born::Device, false); // which goes home in pieces
    const auto next = rig.newBlock(1000, Born::Device, false);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
    {
      const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
      rig.cache.beforeChange(pin, stream);
      rig.cache.adopt(*next, rig.newResult(stream, pattern(2, 1000)), stream);
      EXPECT_EQ(rig.cache.transferStats(0).bytesToHost, 1000U);
      EXPECT_TRUE(block->slots.front()->share == Share::Dirty && next->slots.front()->share == Share::Passing);
      rig.writeOnDevice(stream, pin.data(), pattern(3, 1000));
      rig.cache.bringHome(pin, stream);
    }
    rig.cache.setBudget(0);
    EXPECT_EQ(rig.cache.transferStats(0).bytesToHost, 2000U) << "now that it is let go";
    EXPECT_EQ(rig.read(*block), pattern(3, 1000));
    EXPECT_EQ(rig.read(*next), pattern(2, 1000));
    ASSERT_NO_THROW(rig.sim.drain()) << "seed " << seed;
    ASSERT_EQ(rig.sim.reports(), std::vector<std::string>()) << "seed " << seed;
  }
}

/// A Block that was fetched, and that a job is about to write to.
class BringHomeOfJobs : public testing::TestWithParam<HostJobs::When> {
 protected:
  BringHomeOfJobs() {
    // Where a thread does them, what comes first takes long.
    if (GetParam() == HostJobs::When::Soon)
      rig.cache.runLater({{block.get(), Access::Read}}, [this] { goOn.get_future().wait(); });
    rig.cache.runLater({{block.get(), Access::Write}}, [this] { std::memcpy(block->data, pattern(2, 1000).data(), 1000); });
  }

  static CoreOptions options() {
    CoreOptions options;
    options.cache.hostJobs = GetParam();
    return options;
  }

  std::promise<void> goOn;
  Rig rig{options()};
  const Stream stream = rig.sim.createStream(0);
  const decltype(rig.newBlock(1)) block = rig.newBlock(pattern(1, 1000));
  const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
};
INSTANTIATE_TEST_SUITE_P(
    Whenever, BringHomeOfJobs, testing::Values(HostJobs::When::AtOnce, HostJobs::When::Wanted, HostJobs::When::Soon),
    [](const auto& info) {
      return info.param == HostJobs::When::AtOnce ? "AtOnce" : info.param == HostJobs::When::Wanted ? "Wanted" : "Soon";
    });

// The Block is written to since, though nobody has waited for that yet.
TEST_P(BringHomeOfJobs, WhatAJobIsAboutToWriteIsNotOverwritten) {
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    goOn.set_value();
  });
  rig.cache.bringHome(pin, stream);
  EXPECT_EQ(rig.read(*block), pattern(2, 1000));
  later.join();
  rig.cache.finishJobs();
}

TEST_P(BringHomeOfJobs, WhatAJobIsAboutToWriteIsNoSource) {
  EXPECT_EQ(rig.cache.retainSource(pin), nullptr) << "a fetch of it gives other bytes than the Pin shows";
  goOn.set_value();
  rig.cache.finishJobs();
}

// Host and device agree on the bytes, whichever call of the Link fails.
TEST(BringHome, WhereItFailsTheBlockHasOneValue) {
  bool failed = true;
  for (std::uint64_t n = 1; failed; ++n) {
    Rig rig;
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    {
      const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
      rig.writeOnDevice(stream, pin.data(), pattern(2, 1000));
      rig.link.fail(n);
      try {
        rig.cache.bringHome(pin, stream);
      } catch (const Error&) {
      }
      failed = rig.link.failures() > 0;
      rig.link.fail(0);
    }
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
    rig.sim.drain();
    EXPECT_EQ(*seen, rig.read(*block)) << "call " << n;
  }
}

// For the thread sanitizer.
TEST(BringHome, WhileAnotherThreadFetches) {
  CoreOptions options;
  options.sim.detectRaces = false; // the bytes are the user's affair
  options.cache.validate = false;
  Rig rig(options);
  const auto block = rig.newBlock(pattern(1, 1000));
  std::thread other([&] {
    const Stream stream = rig.sim.createStream(0);
    for (int repeat = 0; repeat < 2000; ++repeat) {
      const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
      rig.cache.bringHome(pin, stream);
    }
  });
  const Stream stream = rig.sim.createStream(0);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    (void)rig.cache.fetch(*block, {0, 1000}, stream);
    rig.cache.emptyCache(0);
  }
  other.join();
}

} // namespace
} // namespace offload
