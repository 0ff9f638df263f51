// A budget that goes by what is free, and what goes back where an allocator asks.
#include <atomic>
#include <chrono>
#include <thread>

#include "budget_rig.h"

namespace offload {
namespace {

using namespace core_test;

TEST_F(Budget, AnAutomaticOneIsKnownBeforeTheFirstFetch) {
  make(std::nullopt, 2);
  EXPECT_EQ(rig_->cache.budget(0), 60 * kBytes);
  void* const others = rig_->sim.allocate(10 * kBytes, {});
  EXPECT_EQ(rig_->cache.budget(0), 60 * kBytes) << "to ask again is the fetches' affair";
  rig_->sim.free(others, {});
  pass();
  EXPECT_GE(rig_->cache.budget(0), 58 * kBytes);
  Rig set(withBudget(3 * kBytes));
  EXPECT_EQ(set.cache.budget(0), 3 * kBytes);
}

TEST_F(Budget, AnAutomaticOneTakesWhatIsFreeAndGivesItBack) {
  make(std::nullopt, 40);
  pass();
  pass();
  EXPECT_EQ(pass(), 0U);
  // Beside what somebody else takes, the headroom and a ring of two, 36 are left.
  void* const taken = rig_->sim.allocate(22 * kBytes, {});
  pass();
  pass();
  EXPECT_EQ(rig_->cache.stats(0).stayingBytes, 36 * kBytes);
  for (int again = 0; again < 5; ++again) EXPECT_EQ(pass(), 4 * kBytes);
  rig_->sim.free(taken, {});
  pass();
  pass();
  EXPECT_EQ(pass(), 0U);
}

TEST_F(Budget, IsGivenBackWhereAnAllocatorAsks) {
  make(8 * kBytes, 8);
  pass();
  const Pin pinned = rig_->cache.fetch(*layers_[0], {0, kBytes}, {});
  const std::uint64_t evictions = rig_->cache.stats(0).evictions;
  EXPECT_EQ(rig_->cache.stats(0).stayingBytes, 8 * kBytes);
  EXPECT_EQ(rig_->cache.relieve(0, 7, 0, kBytes + 8), 2 * kBytes);
  EXPECT_EQ(rig_->cache.stats(0).slotBytes, 6 * kBytes);
  EXPECT_EQ(rig_->cache.stats(0).evictions, evictions + 2);
  EXPECT_EQ(pass(), 2 * kBytes) << "what was given up has the same bytes again";
  EXPECT_EQ(pass(), 0U);
  EXPECT_EQ(rig_->cache.relieve(0, 7, kBytes + 8, 0), 2 * kBytes);
  EXPECT_EQ(rig_->cache.relieve(0, 0, 100 * kBytes, 0), 5 * kBytes) << "all but what is pinned";
  EXPECT_EQ(rig_->cache.relieve(0, 1, 1, 9), 0U);
  EXPECT_EQ(rig_->cache.stats(0).evictions, evictions + 9);
  rig_->sim.drain();
  EXPECT_EQ(std::memcmp(pinned.data(), value(0).data(), kBytes), 0);
  EXPECT_EQ(pass(), 7 * kBytes);
}

// Whose memory the allocator has itself: it goes later, as it may not go under the allocator's lock.
TEST_F(Budget, WhatIsOwnedElsewhereDoesNotCountWhereAnAllocatorAsks) {
  rig_ = std::make_unique<Rig>(withBudget(0, 4 * kBytes));
  for (std::size_t k = 0; k < 2; ++k) {
    layers_.push_back(rig_->newBlock(kBytes));
    adopt(*layers_.back(), k);
  }
  for (std::size_t k = 2; k < 4; ++k) {
    layers_.push_back(rig_->newBlock(value(k)));
    rig_->cache.fetch(*layers_.back(), {0, kBytes}, {});
  }
  EXPECT_EQ(rig_->owned, 2);
  EXPECT_EQ(rig_->cache.relieve(0, 0, 0, 2 * kBytes), 2 * kBytes);
  EXPECT_EQ(rig_->sim.bytesInUse(0), 2 * kBytes) << "of results, which nobody has freed yet";
  for (std::size_t k = 0; k < 4; ++k) EXPECT_EQ(rig_->read(*layers_[k]), value(k));
}

TEST_F(Budget, WhatAnAllocatorAsksForOftenIsLeftFree) {
  make(std::nullopt, 40);
  pass();
  pass();
  const std::uint64_t evictions = rig_->cache.stats(0).evictions;
  EXPECT_EQ(rig_->cache.relieve(0, 24 * kBytes, 0, 34 * kBytes), 10 * kBytes) << "after a long time";
  EXPECT_EQ(rig_->cache.stats(0).evictions, evictions + 10);
  pass();
  pass();
  EXPECT_EQ(pass(), 0U) << "and all is back";
  for (int step = 0; step < 4; ++step) {
    const std::size_t given = rig_->cache.relieve(0, rig_->sim.memoryInfo(0).free, 34 * kBytes, 64 * kBytes);
    EXPECT_TRUE(given > 0 || step > 0);
    pass();
    EXPECT_LE(rig_->cache.stats(0).slotBytes, 32 * kBytes) << "with the ring";
    EXPECT_GE(rig_->cache.stats(0).slotBytes, 28 * kBytes);
  }
  for (int step = 0; step < 20; ++step) pass();
  EXPECT_EQ(pass(), 0U);
}

// As the allocator does in a first forward pass, whose memory grows step by step.
TEST_F(Budget, WhoAsksAgainInOnePassGetsAsMuch) {
  make(std::nullopt, 40);
  pass();
  pass();
  EXPECT_EQ(rig_->cache.relieve(0, 30 * kBytes, kBytes, 34 * kBytes), 4 * kBytes) << "after a long time";
  EXPECT_EQ(rig_->cache.relieve(0, 26 * kBytes, kBytes, 34 * kBytes), 8 * kBytes) << "the same pass goes on";
  pass();
  EXPECT_EQ(rig_->cache.relieve(0, 26 * kBytes, kBytes, 34 * kBytes), 0U) << "of late it asked for a layer";
  EXPECT_EQ(rig_->cache.relieve(0, 0, kBytes, 34 * kBytes), kBytes);
}

TEST_F(Budget, ARequestThatWasRefusedGetsItsSize) {
  make(std::nullopt, 40);
  pass();
  pass();
  EXPECT_EQ(pass(), 0U);
  const std::size_t budget = rig_->cache.budget(0);
  EXPECT_EQ(rig_->cache.relieveOf(0, 10 * kBytes), 10 * kBytes) << "however much is free by now";
  void* const taken = rig_->sim.allocate(rig_->sim.memoryInfo(0).free, {}); // the request, asked for once more
  passThrough(0, 1);
  EXPECT_LE(rig_->cache.budget(0), budget - 10 * kBytes) << "the next fetch looks at what is left";
  EXPECT_GE(pass(), 9 * kBytes);
  rig_->sim.free(taken, {});
  for (int step = 0; step < 20; ++step) pass();
  EXPECT_EQ(pass(), 0U);
  EXPECT_EQ(rig_->cache.relieveOf(0, 100 * kBytes), 40 * kBytes) << "all there is";
}

// Whoever asks holds the allocator's lock, and may not wait long; but those that are busy here are soon done.
TEST_F(Budget, IsGivenBackThoughAnotherThreadIsBusyHere) {
  make(4 * kBytes, 4);
  std::atomic<int> looks = 0;
  std::atomic<bool> done = false;
  std::thread busy([&] {
    for (; !done; ++looks) rig_->cache.validate();
  });
  while (looks == 0) std::this_thread::yield();
  constexpr int kTimes = 2000;
  int given = 0;
  for (int k = 0; k < kTimes; ++k) {
    rig_->cache.fetch(*layers_[0], {0, kBytes}, {});
    std::this_thread::sleep_for(std::chrono::microseconds(20)); // or the other one is still waiting for this fetch
    given += rig_->cache.relieveOf(0, kBytes) == kBytes ? 1 : 0;
  }
  done = true;
  busy.join();
  EXPECT_GE(given, kTimes * 95 / 100);
}

TEST_F(Budget, WhatCannotBeAskedForAgainIsNotLeftFree) {
  make(std::nullopt, 40);
  pass();
  pass();
  (void)rig_->cache.relieve(0, 24 * kBytes, 0, 34 * kBytes); // the first time
  for (int step = 0; step < 3; ++step) pass();
  EXPECT_GT(rig_->cache.relieve(0, rig_->sim.memoryInfo(0).free, 34 * kBytes, 64 * kBytes, 0), 0U);
  EXPECT_GT(pass(), 0U);
  pass();
  EXPECT_EQ(pass(), 0U) << "all is back";
}

/// A device of which the process may use a part.
struct Confined : FaultLink {
  using FaultLink::FaultLink;
  MemoryInfo memoryInfo(int device) override {
    MemoryInfo info = FaultLink::memoryInfo(device);
    info.free -= info.total - info.total / 8;
    info.total /= 8;
    return info;
  }
};

TEST(AutomaticBudget, LeavesFreeAPartOfWhatTheProcessMayUse) {
  CoreOptions options = withBudget(std::nullopt);
  const std::size_t total = options.sim.deviceBytes;
  options.cache.headroomBytes = total / 8;
  options.cache.headroomShare = 1.0 / 4;
  Rig whole(options);
  EXPECT_EQ(whole.cache.budget(0), total - total / 8);
  BasicRig<Confined> rig(options);
  EXPECT_EQ(rig.cache.budget(0), total / 8 - total / 32);
}

/// And that refuses what is beyond that part.
struct WithCeiling : Confined {
  using Confined::Confined;
  void* allocate(std::size_t bytes, Stream stream) override {
    const MemoryInfo info = FaultLink::memoryInfo(stream.device);
    if (info.total - info.free + bytes > info.total / 8) throw OutOfMemory(OutOfMemory::Where::Device, bytes, "no memory");
    return Confined::allocate(bytes, stream);
  }
};

// Somebody else takes memory of what the process may use, and gives it back: what stays gives way, and comes back with the same bytes.
TEST(AutomaticBudget, WithinACeilingWhatStaysIsGivenBackAndNoByteIsWrong) {
  CoreOptions options = withBudget(std::nullopt);
  options.cache.headroomBytes = kBytes;
  options.sim.deviceBytes = 128 * kBytes; // 16 of which the process may use
  BasicRig<WithCeiling> rig(options);
  std::vector<BasicRig<WithCeiling>::BlockPtr> layers;
  for (std::size_t k = 0; k < 20; ++k) layers.push_back(rig.newBlock(value(k)));
  std::uint64_t tag = 0;
  const auto pass = [&] {
    for (std::size_t k = 0; k < layers.size(); ++k) {
      const Pin pin = rig.cache.fetch(*layers[k], {0, kBytes}, {});
      const auto seen = rig.readOnDevice({}, pin.data(), kBytes);
      rig.sim.drain();
      EXPECT_EQ(*seen, value(tag + k)) << "layer " << k;
    }
    EXPECT_LE(rig.sim.bytesInUse(0), options.sim.deviceBytes / 8);
    return rig.cache.stats(0).stayingBytes;
  };
  for (int time = 0; time < 3; ++time) {
    pass();
    const std::size_t alone = pass();
    EXPECT_GE(alone, 8 * kBytes) << "there is something to give back";
    const std::uint64_t evictions = rig.cache.stats(0).evictions;
    (void)rig.cache.relieve(0, 0, 8 * kBytes, 8 * kBytes); // an allocator that has come to the ceiling
    EXPECT_GE(rig.cache.stats(0).evictions, evictions + 8);
    void* const others = rig.link.allocate(8 * kBytes, {});
    pass();
    EXPECT_LT(pass(), alone);
    rig.link.free(others, {});
    tag += 100;
    for (std::size_t k = 0; k < layers.size(); ++k) rig.write(*layers[k], value(tag + k));
    for (int quiet = 0; quiet < 20; ++quiet) pass();
  }
}

struct SlowToTell : FaultLink {
  using FaultLink::FaultLink;
  MemoryInfo memoryInfo(int device) override {
    ++asked;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return FaultLink::memoryInfo(device);
  }
  int asked = 0;
};

TEST(AutomaticBudget, ADriverThatTakesLongIsAskedSeldom) {
  CoreOptions options = withBudget(std::nullopt);
  options.cache.lookInterval = std::chrono::microseconds(1);
  BasicRig<SlowToTell> rig(options);
  const auto block = rig.newBlock(value(1));
  const auto other = rig.newBlock(value(2));
  for (int pass = 0; pass < 50; ++pass) {
    for (const auto* each : {&block, &other}) (void)rig.cache.fetch(**each, {0, kBytes}, {});
  }
  EXPECT_GT(rig.cache.budget(0), 0U);
  EXPECT_LE(rig.link.asked, 2) << "50 passes take less than 200 times 20 ms";
}

} // namespace
} // namespace offload
