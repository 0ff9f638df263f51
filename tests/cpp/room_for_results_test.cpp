// Results beside weights that would fill the budget: which of both makes room.
#include "budget_rig.h"

namespace offload {
namespace {

using namespace core_test;

/// A model of 16 layers with a budget for eight of them, each of whose layers passes a result of a half on to the next.
class RoomForResults : public Budget {
 protected:
  RoomForResults() {
    make(8 * kBytes, 16);
  }
  /// Fetches the layer, and the last result, and makes the next; how many bytes the link carried for it both ways.
  std::pair<std::size_t, std::size_t> forward(std::size_t alive = 1, bool backward = false, bool inGroups = false) {
    const std::size_t down = rig_->cache.transferStats(0).bytesToDevice;
    const std::size_t up = home();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      (void)passThrough(backward ? layers_.size() - 1 - i : i, 1);
      if (!results_.empty()) expectValue(results_.size() - 1);
      results_.push_back(rig_->newBlock(kBytes / 2, Born::Device));
      adopt(*results_.back(), ++made_);
      if (results_.size() > alive) results_.erase(results_.begin());
      if (inGroups && i % 4 == 3) results_.clear();
    }
    return {rig_->cache.transferStats(0).bytesToDevice - down, home() - up};
  }
  void expectValue(std::size_t k) {
    const Pin pin = rig_->cache.fetch(*results_[k], {0, kBytes / 2}, {});
    const auto seen = rig_->readOnDevice({}, pin.data(), 4096);
    rig_->sim.drain();
    EXPECT_EQ(*seen, pattern(made_ - (results_.size() - 1 - k), 4096));
  }

  std::vector<Rig::BlockPtr> results_;
  std::uint64_t made_ = 0;
};

TEST_F(RoomForResults, AWeightGivesWayOnceForAllOfAPass) {
  for (int step = 0; step < 4; ++step) pass();
  EXPECT_EQ(rig_->cache.stats(0).stayingBytes, 8 * kBytes);
  for (int step = 0; step < 12; ++step) {
    const auto [down, up] = forward(4);
    EXPECT_EQ(up, 0U) << "what one layer passes on to the next";
    if (step < 4) continue;
    EXPECT_LE(down, 12 * kBytes) << "8 have no room, and three or four gave it";
    EXPECT_GE(down, 10 * kBytes);
  }
}

TEST_F(RoomForResults, NoWeightComesBackWhileThereAreNone) {
  for (int step = 0; step < 4; ++step) forward(4, false, true);
  for (int step = 0; step < 8; ++step) {
    const auto [down, up] = forward(4, false, true);
    EXPECT_EQ(up, 0U);
    EXPECT_LE(down, 12 * kBytes) << "to go again in the middle of the next group";
  }
}

TEST_F(RoomForResults, WeightsComeBackWhereThereAreNone) {
  for (int step = 0; step < 4; ++step) forward(4);
  results_.clear();
  for (int step = 0; step < 4; ++step) pass();
  EXPECT_EQ(pass(), 8 * kBytes);
}

TEST_F(RoomForResults, HalfOfTheBudgetIsTheMost) {
  for (int step = 0; step < 4; ++step) {
    forward(16); // as many as a backward pass reads
    forward(16, true);
  }
  const auto [down, up] = forward(16);
  EXPECT_GT(up, 0U);
  EXPECT_GE(rig_->cache.stats(0).stayingBytes, 2 * kBytes);
  EXPECT_LE(down, 14 * kBytes);
  for (std::size_t k = 0; k < results_.size(); ++k) expectValue(k);
}

TEST_F(RoomForResults, WhatNobodyUsesGoesHomeBeforeAWeightDoes) {
  layers_.clear();
  make(16 * kBytes, 32);
  std::vector<Rig::BlockPtr> collected;
  std::size_t down = 0;
  std::size_t before = 0;
  constexpr std::uint64_t kSteps = 40;
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    if (step == kSteps / 2) before = home();
    const auto fetched = forward().first;
    if (step >= kSteps / 2) down += fetched;
    collected.push_back(rig_->newBlock(kBytes / 2, Born::Device));
    adopt(*collected.back(), 1000 + step);
  }
  EXPECT_EQ(home() - before, kSteps / 2 * kBytes / 2) << "each of them, some passes later";
  EXPECT_LE(down, kSteps / 2 * 21 * kBytes) << "but for those of late, the weights stay";
  for (std::uint64_t step = 0; step < kSteps; ++step) EXPECT_EQ(rig_->read(*collected[step]), value(1000 + step, kBytes / 2));
}

TEST_F(RoomForResults, GradientsTakeWhatWeightsLeave) {
  for (int step = 0; step < 4; ++step) pass();
  const std::size_t staying = rig_->cache.stats(0).stayingBytes;
  const auto gradient = newGradient();
  adopt(*gradient, 7);
  EXPECT_EQ(rig_->cache.stats(0).stayingBytes, staying);
  EXPECT_EQ(home(), kBytes);
  EXPECT_EQ(rig_->read(*gradient), value(7));
}

TEST_F(RoomForResults, NothingIsLeftToThemInABudgetOfNothing) {
  rig_->cache.setBudget(0);
  forward();
  const auto [down, up] = forward();
  EXPECT_EQ(up, 16 * kBytes / 2);
  EXPECT_GE(down, 16 * kBytes);
}

} // namespace
} // namespace offload
