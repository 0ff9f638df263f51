// Blocks of several processes: two caches, each with a Link of its own, open the same memory.
#include <unistd.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 1000;

CoreOptions process(std::uint64_t seed, bool pageable) {
  CoreOptions options;
  options.sim.seed = seed;
  options.sim.bias = seed % 3 == 0 ? SimBias::Late : SimBias::Seeded;
  options.sim.wantsRegistration = true;
  options.arena.pinnedLimit = pageable ? 0 : SIZE_MAX;
  options.cache.chunkBytes = kBytes / 4;
  options.cache.budgetBytes = seed % 2 == 0 ? 0 : 1 << 20;
  options.cache.poison = true;
  return options;
}

struct Process {
  Process(std::uint64_t seed, bool pageable) : rig(process(seed, pageable)) {}

  Bytes fetched(Extent extent = {0, kBytes}) {
    const Pin pin = rig.cache.fetch(*block, extent, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), extent.bytes());
    rig.sim.drain();
    return *seen;
  }
  void store(const Bytes& value, std::size_t at = 0) {
    const DeviceBuffer result = rig.newResult(stream, value);
    rig.cache.store(*block, {at, at + value.size()}, result.data, stream);
  }
  void adopt(const Bytes& value) {
    rig.cache.adopt(*block, rig.newResult(stream, value), stream);
  }
  ResidencyStats stats() const {
    return rig.cache.stats(0);
  }

  Rig rig;
  Stream stream = rig.sim.createStream(0);
  Rig::BlockPtr block;
};

struct TwoProcesses {
  explicit TwoProcesses(std::uint64_t seed = 0, bool pageable = false) : one(seed, pageable), two(seed + 1000, pageable) {
    one.block = one.rig.newSharedBlock(pattern(1, kBytes));
    two.block = two.rig.newSharedBlock(two.rig.arena.openShared(dup(one.block->shared->descriptor())));
  }
  void validate() const {
    one.rig.cache.validate(*one.block);
    two.rig.cache.validate(*two.block);
  }

  Process one;
  Process two;
};

class SharedBlock : public testing::TestWithParam<bool> {
 protected:
  TwoProcesses both{0, GetParam()};
  Process& one = both.one;
  Process& two = both.two;
};
INSTANTIATE_TEST_SUITE_P(Memory, SharedBlock, testing::Bool(), [](const auto& info) {
  return info.param ? "Pageable" : "Pinned";
});

TEST_P(SharedBlock, IsPageLockedWithinTheLimit) {
  EXPECT_EQ(memoryOf(*one.block), GetParam() ? HostMemory::Pageable : HostMemory::Pinned);
  EXPECT_EQ(memoryOf(*two.block), memoryOf(*one.block));
}

TEST_P(SharedBlock, AWriteOfAnotherProcessOutdatesASlotOnce) {
  EXPECT_EQ(two.fetched(), pattern(1, kBytes));
  EXPECT_EQ(two.fetched(), pattern(1, kBytes));
  EXPECT_EQ(two.stats().hits, 1U);
  one.rig.write(*one.block, pattern(2, kBytes));
  EXPECT_EQ(two.fetched(), pattern(2, kBytes));
  EXPECT_EQ(two.stats().hits, 1U);
  EXPECT_EQ(two.fetched(), pattern(2, kBytes));
  EXPECT_EQ(two.stats().hits, 2U);
  both.validate();
}

TEST_P(SharedBlock, AWriteOfItsOwnOutdatesASlotOnce) {
  one.fetched();
  one.rig.write(*one.block, pattern(2, kBytes));
  EXPECT_EQ(one.fetched(), pattern(2, kBytes));
  EXPECT_EQ(one.stats().hits, 0U);
  EXPECT_EQ(one.fetched(), pattern(2, kBytes));
  EXPECT_EQ(one.stats().hits, 1U);
  one.store(pattern(3, kBytes));
  EXPECT_EQ(one.fetched(), pattern(3, kBytes));
  EXPECT_EQ(one.fetched(), pattern(3, kBytes));
  EXPECT_EQ(one.stats().hits, 2U);
}

TEST_P(SharedBlock, AReadOutdatesNothing) {
  two.fetched();
  EXPECT_EQ(one.rig.read(*one.block), pattern(1, kBytes));
  EXPECT_EQ(two.rig.read(*two.block), pattern(1, kBytes));
  two.fetched();
  EXPECT_EQ(two.stats().hits, 1U);
}

TEST_P(SharedBlock, AWriteWithoutACacheOutdatesSlots) {
  two.fetched();
  {
    const HostLease lease = HostLease::uncached(*one.block, Access::Write);
    const Bytes value = pattern(5, kBytes);
    std::memcpy(lease.data(), value.data(), kBytes);
  }
  EXPECT_EQ(two.fetched(), pattern(5, kBytes));
  { const HostLease lease = HostLease::uncached(*one.block, Access::Read); }
  two.fetched();
  EXPECT_EQ(two.stats().hits, 1U);
}

TEST_P(SharedBlock, APinnedSlotKeepsItsValue) {
  const Pin pin = two.rig.cache.fetch(*two.block, {0, kBytes}, two.stream);
  two.rig.cache.drain(false); // the other process can't wait for this copy
  one.rig.write(*one.block, pattern(2, kBytes));
  EXPECT_EQ(two.fetched(), pattern(2, kBytes));
  const auto seen = two.rig.readOnDevice(two.stream, pin.data(), kBytes);
  two.rig.sim.drain();
  EXPECT_EQ(*seen, pattern(1, kBytes));
}

// What a process is told after a call must find the bytes, with no call of the writer's in between.
TEST_P(SharedBlock, WritesHaveLandedWhenTheirCallReturns) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    TwoProcesses on(seed, GetParam());
    on.one.adopt(pattern(2, kBytes));
    ASSERT_EQ(on.two.rig.read(*on.two.block), pattern(2, kBytes)) << "adopt, seed " << seed;
    on.one.store(pattern(3, 300), 100);
    Bytes expected = pattern(2, kBytes);
    const Bytes part = pattern(3, 300);
    std::copy(part.begin(), part.end(), expected.begin() + 100);
    ASSERT_EQ(on.two.fetched(), expected) << "store, seed " << seed;
    on.validate();
  }
}

TEST_P(SharedBlock, AnAdoptedResultDoesNotStay) {
  one.adopt(pattern(2, kBytes));
  EXPECT_EQ(one.stats().dirtyBytes, 0U);
  EXPECT_EQ(one.stats().slotBytes, 0U);
  EXPECT_EQ(one.rig.owned, 0);
  EXPECT_EQ(one.fetched(), pattern(2, kBytes));
  void* const data = one.rig.sim.allocate(kBytes, one.stream);
  one.rig.writeOnDevice(one.stream, data, pattern(3, kBytes));
  one.rig.cache.adopt(*one.block, {data, kBytes, one.stream, nullptr}, one.stream);
  EXPECT_EQ(two.fetched(), pattern(3, kBytes));
  one.rig.cache.emptyCache(0);
  EXPECT_EQ(one.rig.sim.bytesInUse(0), 0U);
}

TEST_P(SharedBlock, WhatAnotherProcessWroteIsNotBroughtHomeOver) {
  const Pin pin = one.rig.cache.fetch(*one.block, {0, kBytes}, one.stream);
  one.rig.sim.drain();
  two.rig.write(*two.block, pattern(2, kBytes));
  one.rig.cache.bringHome(pin, one.stream);
  EXPECT_EQ(two.rig.read(*two.block), pattern(2, kBytes)) << "it was written to since by somebody else";
  both.validate();
}

// Another process sees the bytes without asking, and may be told of them when the call returns.
TEST_P(SharedBlock, WorkForLaterIsDoneAndToldWhenItsCallReturns) {
  for (const auto when : {HostJobs::When::AtOnce, HostJobs::When::Wanted, HostJobs::When::Soon}) {
    CoreOptions options = process(0, GetParam());
    options.cache.hostJobs = when;
    Rig rig(options);
    const auto block = rig.newSharedBlock(one.rig.arena.openShared(dup(two.block->shared->descriptor())));
    const Bytes before = two.rig.read(*two.block);
    EXPECT_EQ(two.fetched(), before);
    const Bytes next = pattern(10 + static_cast<std::uint64_t>(when), kBytes);
    const auto version = block->shared->version();
    rig.cache.runLater({{block.get(), Access::Write}}, [&] { std::memcpy(block->data, next.data(), kBytes); });
    EXPECT_EQ(rig.cache.hostJobStats().pending, 0U);
    EXPECT_EQ(block->shared->version(), version + 1);
    EXPECT_EQ(two.fetched(), next);
    EXPECT_EQ(two.rig.read(*two.block), next);
    // What it only reads may be written to by others at any time.
    const auto own = rig.newBlock(kBytes);
    rig.cache.runLater(
        {{own.get(), Access::Write}, {block.get(), Access::Read}}, [&] { std::memcpy(own->data, block->data, kBytes); });
    EXPECT_EQ(rig.cache.hostJobStats().pending, 0U);
    EXPECT_EQ(block->shared->version(), version + 1) << "a read is no write";
    two.rig.write(*two.block, pattern(99, kBytes));
    EXPECT_EQ(rig.read(*own), next);
    rig.cache.validate(*block);
  }
}

/// Does something once, in the middle of a fetch that looks at what is free.
class LooksLink final : public FaultLink {
 public:
  using FaultLink::FaultLink;
  MemoryInfo memoryInfo(int device) override {
    if (now) std::exchange(now, nullptr)();
    return FaultLink::memoryInfo(device);
  }
  std::function<void()> now;
};

// By then it has given the Slot of an older value up.
TEST(SharedBlockOfOne, AFetchThatIsToldOfAFailureLosesNoMemory) {
  CoreOptions options;
  options.cache.budgetBytes = std::nullopt;
  options.cache.lookInterval = std::chrono::microseconds(0);
  options.cache.hostJobs = HostJobs::When::Wanted;
  BasicRig<LooksLink> rig(options);
  const auto block = rig.newSharedBlock(pattern(1, kBytes));
  const auto other = rig.newBlock(pattern(2, kBytes));
  const Stream stream = rig.sim.createStream(0);
  (void)rig.cache.fetch(*block, {0, kBytes}, stream);
  EXPECT_GT(rig.sim.bytesInUse(0), 0U);
  block->shared->bump(); // as another process does that has written
  rig.link.now = [&] {
    rig.cache.runLater({{other.get(), Access::Write}}, [] { throw std::runtime_error("no room"); });
    rig.cache.finishJobs();
  };
  rig.cache.relieveOf(0, 0); // makes a look due
  EXPECT_THROW((void)rig.cache.fetch(*block, {0, kBytes}, stream), Error);
  EXPECT_EQ(rig.link.now, nullptr);
  rig.cache.emptyCache(0);
  rig.sim.drain();
  EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
}

// Calls of either process, one after the other: each must find what the calls before it have left.
TEST_P(SharedBlock, ProcessesThatTakeTurnsSeeTheNewestBytes) {
  for (std::uint64_t seed = 0; seed < 3 * kSeeds; ++seed) {
    SimRandom random(seed);
    TwoProcesses on(seed, GetParam());
    Bytes value = pattern(1, kBytes);
    for (int step = 0; step < 40; ++step) {
      Process& who = random.below(2) == 0 ? on.one : on.two;
      const std::size_t begin = random.below(kBytes);
      const Extent extent{begin, begin + 1 + random.below(kBytes - begin)};
      const Bytes part = pattern(random.next(), extent.bytes());
      const Bytes whole = pattern(random.next(), kBytes);
      switch (random.below(6)) {
        case 0:
          who.rig.write(*who.block, part, extent.begin);
          std::copy(part.begin(), part.end(), value.begin() + static_cast<std::ptrdiff_t>(extent.begin));
          break;
        case 1:
          who.store(part, extent.begin);
          std::copy(part.begin(), part.end(), value.begin() + static_cast<std::ptrdiff_t>(extent.begin));
          break;
        case 2:
          who.adopt(whole);
          value = whole;
          break;
        case 3:
          ASSERT_EQ(who.rig.read(*who.block), value) << "seed " << seed << ", step " << step;
          break;
        default:
          const Bytes expected(
              value.begin() + static_cast<std::ptrdiff_t>(extent.begin),
              value.begin() + static_cast<std::ptrdiff_t>(extent.end));
          ASSERT_EQ(who.fetched(extent), expected) << "seed " << seed << ", step " << step;
      }
      ASSERT_NO_THROW(on.validate()) << "seed " << seed << ", step " << step;
    }
  }
}

/// Does something in the middle of a wait.
class MeanwhileLink : public FaultLink {
 public:
  using FaultLink::FaultLink;
  void synchronize(Event event) override {
    if (const auto now = std::exchange(meanwhile, {})) {
      now();
    }
    FaultLink::synchronize(event);
  }
  std::function<void()> meanwhile;
};

// A write that another process finishes while one of ours lands: what another thread has fetched before it is out of date.
TEST_P(SharedBlock, AWriteInTheMiddleOfAWriteIsNoticed) {
  CoreOptions options = process(0, GetParam());
  options.sim.bias = SimBias::Late;
  BasicRig<MeanwhileLink> rig(options);
  const auto block = rig.newSharedBlock(rig.arena.openShared(dup(one.block->shared->descriptor())));
  const Stream stream = rig.sim.createStream(0);
  auto fetched = [&] {
    const Pin pin = rig.cache.fetch(*block, {0, kBytes}, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), kBytes);
    rig.sim.drain();
    return *seen;
  };
  rig.link.meanwhile = [&] {
    EXPECT_EQ(fetched(), pattern(2, kBytes));
    one.rig.write(*one.block, pattern(3, kBytes));
  };
  rig.cache.adopt(*block, rig.newResult(stream, pattern(2, kBytes)), stream);
  EXPECT_FALSE(rig.link.meanwhile);
  EXPECT_EQ(fetched(), pattern(3, kBytes));
  EXPECT_EQ(one.fetched(), pattern(3, kBytes));
}

// Without any order between them values may be torn, but nobody waits for the other, and in the end both see what there is.
TEST_P(SharedBlock, ProcessesThatWriteAtOnceAgreeInTheEnd) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    TwoProcesses on(seed, GetParam());
    auto work = [&](Process& who, std::uint64_t tag) {
      SimRandom random(tag);
      for (int step = 0; step < 50; ++step) {
        switch (random.below(4)) {
          case 0:
            who.rig.write(*who.block, Bytes(kBytes, static_cast<unsigned char>(random.next())));
            break;
          case 1:
            who.adopt(Bytes(kBytes, static_cast<unsigned char>(random.next())));
            break;
          default:
            who.fetched();
        }
      }
    };
    std::thread other([&] { work(on.two, 2 * seed); });
    work(on.one, 2 * seed + 1);
    other.join();
    const Bytes last = on.one.rig.read(*on.one.block);
    EXPECT_EQ(on.two.rig.read(*on.two.block), last);
    EXPECT_EQ(on.one.fetched(), last);
    EXPECT_EQ(on.two.fetched(), last);
    on.validate();
  }
}

} // namespace
} // namespace offload
