// What stays on the device within a budget, what is newer there than on the host, and how both give way.

#include <algorithm>
#include <chrono>
#include <thread>

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = std::size_t{5} << 18; // more than what stays because it is small

/// A value for each tag, of zeros but for its beginning and its end.
Bytes value(std::uint64_t tag, std::size_t bytes = kBytes) {
  Bytes out(bytes);
  const Bytes ends = pattern(tag, std::min<std::size_t>(bytes, 4096));
  std::copy(ends.begin(), ends.end(), out.begin());
  std::copy(ends.begin(), ends.end(), out.end() - static_cast<std::ptrdiff_t>(ends.size()));
  return out;
}

CoreOptions withBudget(std::optional<std::size_t> budget, std::size_t ring = kBytes) {
  CoreOptions options;
  options.cache.budgetBytes = budget;
  options.cache.ringBytes = ring;
  options.sim.deviceBytes = 64 * kBytes;
  options.cache.headroomBytes = 4 * kBytes;
  return options;
}

class Budget : public ::testing::Test {
 protected:
  void make(std::optional<std::size_t> budget, std::size_t count) {
    rig_ = std::make_unique<Rig>(withBudget(budget));
    for (std::size_t k = 0; k < count; ++k) layers_.push_back(rig_->newBlock(value(k)));
  }
  ~Budget() override {
    layers_.clear();
  }
  /// Fetches every layer in order, checks its bytes, and returns how many bytes the link carried for that.
  std::size_t pass(bool backward = false) {
    return passThrough(0, layers_.size(), backward);
  }
  /// The same with some of the layers.
  std::size_t passThrough(std::size_t first, std::size_t count, bool backward = false) {
    const std::size_t before = rig_->cache.transferStats(0).bytesToDevice;
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t i = first + (backward ? count - 1 - k : k);
      const Pin pin = rig_->cache.fetch(*layers_[i], {0, kBytes}, {});
      const auto* const end = static_cast<const std::byte*>(pin.data()) + kBytes - 4096;
      const auto seen = rig_->readOnDevice({}, end, 4096);
      rig_->sim.drain();
      EXPECT_EQ(*seen, pattern(tag_ + i, 4096)) << "layer " << i;
    }
    for (const auto& layer : layers_) rig_->cache.validate(*layer);
    return rig_->cache.transferStats(0).bytesToDevice - before;
  }
  std::size_t home() const {
    return rig_->cache.transferStats(0).bytesToHost;
  }
  void adopt(Block& block, std::uint64_t tag) {
    rig_->cache.adopt(block, rig_->newResult({}, value(tag, block.bytes)), {});
    rig_->cache.validate(block);
  }
  Rig::BlockPtr newGradient() {
    auto block = rig_->newBlock(kBytes);
    block->purpose = Purpose::Gradient;
    block->derivedFrom = this; // a name
    return block;
  }

  std::unique_ptr<Rig> rig_;
  std::vector<Rig::BlockPtr> layers_;
  std::uint64_t tag_ = 0;
};

TEST_F(Budget, WhatFitsIsFetchedOnce) {
  make(8 * kBytes, 8);
  EXPECT_EQ(pass(), 8 * kBytes);
  EXPECT_EQ(pass(), 0U);
  EXPECT_EQ(pass(true), 0U);
}

TEST_F(Budget, AShareOfACycleIsSaved) {
  make(4 * kBytes, 8);
  pass();
  pass();
  for (int step = 0; step < 4; ++step) {
    EXPECT_EQ(pass(), 4 * kBytes);
    EXPECT_EQ(rig_->cache.stats(0).stayingBytes, 4 * kBytes);
  }
}

TEST_F(Budget, OfForwardAndBackwardTheTurningPointsAreSavedToo) {
  make(4 * kBytes, 8);
  pass();
  pass(true);
  for (int step = 0; step < 3; ++step) {
    // Of the four that do not stay, the ring of two still holds those that came last and are next.
    EXPECT_EQ(pass(), 2 * kBytes);
    EXPECT_EQ(pass(true), 2 * kBytes);
  }
}

TEST_F(Budget, AModelThatIsNotUsedAnyMoreGivesItsShareBack) {
  make(4 * kBytes, 12);
  pass();
  for (int step = 0; step < 8; ++step) passThrough(4, 8);
  for (int step = 0; step < 3; ++step) EXPECT_EQ(passThrough(4, 8), 4 * kBytes) << step;
  EXPECT_GE(pass(), 4 * kBytes);
  for (int step = 0; step < 3; ++step) pass();
  for (int step = 0; step < 3; ++step) EXPECT_EQ(pass(), 8 * kBytes) << "as one of twelve " << step;
}

TEST_F(Budget, AModelThatWasUsedInBetweenGivesItsRoomBack) {
  make(4 * kBytes, 12);
  for (int step = 0; step < 3; ++step) passThrough(0, 8);
  rig_->cache.emptyCache(0);
  for (int step = 0; step < 2; ++step) passThrough(8, 4);
  const auto stays = [](const Rig::BlockPtr& layer) {
    return !layer->slots.empty() && layer->slots[0]->share == Share::Staying;
  };
  EXPECT_TRUE(std::any_of(layers_.begin() + 8, layers_.end(), stays)) << "there was room";
  for (int step = 0; step < 6; ++step) passThrough(0, 8);
  for (int step = 0; step < 3; ++step) EXPECT_EQ(passThrough(0, 8), 4 * kBytes) << step;
}

TEST_F(Budget, AHostWriteIsSeenAndCostsOneFetch) {
  make(8 * kBytes, 8);
  pass();
  pass();
  for (std::size_t k = 0; k < layers_.size(); ++k) rig_->write(*layers_[k], value(100 + k));
  tag_ = 100;
  EXPECT_EQ(pass(), 8 * kBytes);
  EXPECT_EQ(pass(), 0U);
}

TEST_F(Budget, MayBeChangedAtAnyTime) {
  make(8 * kBytes, 8);
  pass();
  pass();
  rig_->cache.setBudget(0);
  EXPECT_EQ(rig_->cache.stats(0).stayingBytes, 0U);
  EXPECT_GE(pass(), 6 * kBytes) << "all but what the ring has room for";
  rig_->cache.setBudget(8 * kBytes);
  pass();
  pass();
  EXPECT_EQ(pass(), 0U);
}

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

TEST_F(Budget, WhatIsOnlyToBeAddedToAGradientTakesNothingOfWhatStays) {
  make(2 * kBytes, 2);
  pass();
  EXPECT_EQ(pass(), 0U);
  const auto addend = rig_->newBlock(kBytes, Born::Device);
  addend->derivedFrom = this;
  adopt(*addend, 7);
  EXPECT_EQ(pass(), 0U);
  EXPECT_EQ(pass(), 0U);
  EXPECT_EQ(home(), 0U);
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

TEST_F(Budget, AResultStaysUntilTheHostAsks) {
  make(4 * kBytes, 0);
  const auto block = rig_->newBlock(kBytes);
  adopt(*block, 1);
  EXPECT_EQ(home(), 0U);
  EXPECT_EQ(rig_->cache.stats(0).dirtyBytes, kBytes);
  const Pin pin = rig_->cache.fetch(*block, {256, 1024}, {});
  EXPECT_EQ(rig_->cache.stats(0).hits, 1U);
  EXPECT_EQ(rig_->read(*block), value(1));
  EXPECT_EQ(home(), kBytes);
  EXPECT_EQ(rig_->cache.stats(0).dirtyBytes, 0U);
  EXPECT_EQ(rig_->read(*block), value(1));
  EXPECT_EQ(home(), kBytes) << "it is home already";
}

TEST_F(Budget, AResultThatNobodyAsksForNeverMoves) {
  make(4 * kBytes, 0);
  for (std::uint64_t k = 0; k < 10; ++k) {
    const auto block = rig_->newBlock(kBytes);
    for (std::uint64_t j = 0; j < 3; ++j) adopt(*block, 3 * k + j);
    const Pin pin = rig_->cache.fetch(*block, {0, kBytes}, {});
    const auto seen = rig_->readOnDevice({}, pin.data(), kBytes);
    rig_->sim.drain();
    EXPECT_EQ(*seen, value(3 * k + 2));
  }
  EXPECT_EQ(home(), 0U);
  EXPECT_EQ(rig_->cache.stats(0).slotBytes, 0U);
}

TEST_F(Budget, WhatDoesNotFitGoesHomeTheOldestFirst) {
  make(3 * kBytes, 0);
  std::vector<Rig::BlockPtr> blocks;
  for (std::uint64_t k = 0; k < 5; ++k) {
    blocks.push_back(rig_->newBlock(kBytes));
    adopt(*blocks.back(), k);
  }
  EXPECT_EQ(home(), 2 * kBytes);
  EXPECT_EQ(rig_->cache.stats(0).dirtyBytes, 3 * kBytes);
  EXPECT_LT(blocks[4]->hostVersion, blocks[4]->version);
  EXPECT_EQ(blocks[0]->hostVersion, blocks[0]->version);
  for (std::uint64_t k = 0; k < 5; ++k) EXPECT_EQ(rig_->read(*blocks[k]), value(k));
  EXPECT_EQ(home(), 5 * kBytes);
}

TEST_F(Budget, WithoutOneResultsGoHomeAtOnce) {
  make(0, 0);
  const auto block = rig_->newBlock(kBytes);
  adopt(*block, 1);
  EXPECT_EQ(home(), kBytes);
  EXPECT_EQ(rig_->cache.stats(0).dirtyBytes, 0U);
}

TEST_F(Budget, TheGradientOfAnActivationStays) {
  make(8 * kBytes, 1);
  const auto block = newGradient();
  block->derivedFrom = nullptr;
  adopt(*block, 1);
  EXPECT_EQ(home(), 0U) << "no host asks for it";
}

TEST_F(Budget, AGradientGoesHomeAtItsLastAddition) {
  make(4 * kBytes, 0);
  for (const std::uint32_t rounds : {1U, 4U, 2U}) {
    for (int step = 0; step < 3; ++step) {
      const auto gradient = newGradient();
      const std::size_t before = home();
      for (std::uint32_t k = 0; k < rounds; ++k) adopt(*gradient, k);
      const std::size_t unasked = home() - before;
      EXPECT_EQ(rig_->read(*gradient), value(rounds - 1));
      if (step == 0) continue; // learns
      EXPECT_EQ(unasked, kBytes) << rounds << " rounds: on its way before the host asks";
      EXPECT_EQ(home() - before, kBytes) << rounds << " rounds: one trip";
    }
  }
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

TEST_F(Budget, EveryParameterHasItsOwnLastAddition) {
  make(8 * kBytes, 0);
  const auto both = rig_->newBlock(2 * kBytes);
  const auto* const once = static_cast<const std::byte*>(both->data);
  const auto* const twice = once + kBytes;
  for (int step = 0; step < 3; ++step) {
    const auto first = newGradient();
    const auto second = newGradient();
    first->derivedFrom = once;
    second->derivedFrom = twice;
    const std::size_t before = home();
    adopt(*second, 1);
    const std::size_t early = home();
    adopt(*second, 2);
    adopt(*first, 3);
    const std::size_t unasked = home();
    if (step > 0) {
      EXPECT_EQ(early, before) << "another addition is to come";
      EXPECT_EQ(unasked - before, 2 * kBytes) << "each is on its way before the host asks";
    }
    EXPECT_EQ(rig_->read(*second), value(2));
    EXPECT_EQ(rig_->read(*first), value(3));
    EXPECT_EQ(home(), unasked);
  }
}

// Each micro-batch adds to all of them in the same order, so what has been there longest is wanted first.
TEST_F(Budget, OfGradientsAsManyStayAsThereIsRoomFor) {
  make(2 * kBytes, 4);
  for (int step = 0; step < 3; ++step) {
    std::vector<Rig::BlockPtr> gradients;
    std::vector<std::size_t> trips;
    for (std::uint64_t round = 0; round < 3; ++round) {
      const std::size_t before = home();
      for (std::size_t k = 0; k < layers_.size(); ++k) {
        if (round == 0) gradients.push_back(newGradient());
        gradients[k]->derivedFrom = layers_[k]->data;
        const auto addend = rig_->newBlock(kBytes);
        addend->derivedFrom = layers_[k]->data;
        if (round > 0) adopt(*addend, 100); // which takes the room of none
        adopt(*gradients[k], 10 * round + k);
      }
      trips.push_back((home() - before) / kBytes);
    }
    for (std::size_t k = 0; k < layers_.size(); ++k) EXPECT_EQ(rig_->read(*gradients[k]), value(20 + k));
    if (step == 0) continue; // learns
    EXPECT_EQ(trips, (std::vector<std::size_t>{2, 2, 4})) << "the last round takes them all home";
  }
}

TEST_F(Budget, APartOfADirtyBlockIsWrittenAroundWhatIsThere) {
  make(4 * kBytes, 0);
  const auto block = rig_->newBlock(kBytes);
  adopt(*block, 1);
  const Bytes part = pattern(2, 1024);
  const DeviceBuffer source = rig_->newResult({}, part);
  rig_->cache.store(*block, {512, 1536}, source.data, {});
  Bytes expected = value(1);
  std::copy(part.begin(), part.end(), expected.begin() + 512);
  EXPECT_EQ(rig_->read(*block), expected);
  const Pin pin = rig_->cache.fetch(*block, {0, kBytes}, {});
  rig_->sim.drain();
  EXPECT_EQ(std::memcmp(pin.data(), expected.data(), kBytes), 0);
}

TEST_F(Budget, ARefusedTripHomeLosesNothing) {
  make(4 * kBytes, 0);
  const auto block = rig_->newBlock(kBytes);
  adopt(*block, 1);
  for (std::uint64_t call = 1; call < 4; ++call) {
    rig_->link.fail(call);
    try {
      const HostLease lease = rig_->cache.lease(*block, Access::Read);
    } catch (const Error&) {
    }
    rig_->link.fail(0);
    rig_->cache.validate(*block);
  }
  EXPECT_EQ(rig_->read(*block), value(1));
}

TEST_F(Budget, AnEmptyCacheHasSentEverythingHome) {
  make(8 * kBytes, 2);
  const auto block = rig_->newBlock(kBytes);
  adopt(*block, 1);
  pass();
  EXPECT_EQ(rig_->cache.emptyCache(0), 3 * kBytes);
  EXPECT_EQ(rig_->cache.stats(0).slotBytes, 0U);
  EXPECT_EQ(rig_->read(*block), value(1));
}

} // namespace
} // namespace offload
