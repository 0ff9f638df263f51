// What stays on the device within a budget, what is newer there than on the host, and how both give way.

#include "budget_rig.h"

namespace offload {
namespace {

using namespace core_test;

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

TEST_F(Budget, ARefusedTripHomeLetsTheNextGoFirst) {
  make(2 * kBytes, 0);
  const auto refused = rig_->newBlock(kBytes);
  const auto next = rig_->newBlock(kBytes);
  adopt(*refused, 1);
  adopt(*next, 2);
  rig_->link.fail(1);
  rig_->cache.setBudget(kBytes);
  EXPECT_EQ(rig_->link.failures(), 1U);
  rig_->link.fail(0);
  EXPECT_EQ(home(), kBytes);
  EXPECT_EQ(refused->slots.front()->share, Share::Dirty);
  EXPECT_TRUE(next->slots.empty()) << "the ring has no room for it";
  rig_->cache.setBudget(0);
  EXPECT_EQ(home(), 2 * kBytes);
  EXPECT_EQ(rig_->read(*refused), value(1));
  EXPECT_EQ(rig_->read(*next), value(2));
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
