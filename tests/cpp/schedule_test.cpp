// Which extents stay on the device: for cycles, for forward and backward, and for orders that have no end.
#include "core/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "core/block.h"

namespace offload {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

class ScheduleTest : public ::testing::Test {
 protected:
  Block& newBlock(std::size_t bytes, Born born = Born::Host) {
    return blocks_.emplace_back(nullptr, bytes, BlockKind::Pinned, born, 0);
  }
  std::vector<Block*> newBlocks(std::size_t count, std::size_t bytes) {
    std::vector<Block*> made;
    for (std::size_t k = 0; k < count; ++k) made.push_back(&newBlock(bytes));
    return made;
  }
  /// Fetches each, with a copy where it does not stay; how many passes ended on the way.
  int fetch(const std::vector<Block*>& order) {
    int ended = 0;
    for (Block* block : order) {
      if (schedule.record(*block, {0, block->bytes})) {
        schedule.plan(budget);
        ++ended;
      }
      if (!stays(*block)) schedule.missed(block->bytes);
    }
    return ended;
  }
  bool stays(const Block& block, bool room = false) const {
    return schedule.keeps(block, {0, block.bytes}, room);
  }
  std::vector<bool> stay(const std::vector<Block*>& order) const {
    std::vector<bool> all;
    for (const Block* block : order) all.push_back(stays(*block));
    return all;
  }
  static std::vector<Block*> reversed(std::vector<Block*> order) {
    std::reverse(order.begin(), order.end());
    return order;
  }

  std::deque<Block> blocks_;
  Schedule schedule;
  std::size_t budget = 0;
};

TEST_F(ScheduleTest, NothingStaysWithoutABudget) {
  const auto layers = newBlocks(8, 4 * kMiB);
  for (int step = 0; step < 3; ++step) fetch(layers);
  for (const Block* layer : layers) EXPECT_FALSE(stays(*layer, true));
}

TEST_F(ScheduleTest, EverythingStaysWhereItFits) {
  budget = 32 * kMiB;
  const auto layers = newBlocks(8, 4 * kMiB);
  fetch(layers);
  for (const Block* layer : layers) EXPECT_TRUE(stays(*layer, true)) << "not known yet, but there is room";
  fetch(layers);
  for (const Block* layer : layers) EXPECT_TRUE(stays(*layer));
}

TEST_F(ScheduleTest, HalfOfACycleIsEveryOtherLayer) {
  budget = 16 * kMiB;
  const auto layers = newBlocks(8, 4 * kMiB);
  for (int step = 0; step < 2; ++step) fetch(layers);
  const std::vector<bool> expected{true, false, true, false, true, false, true, false};
  EXPECT_EQ(stay(layers), expected);
}

TEST_F(ScheduleTest, TheSetIsFixedAndSpreadAndWithinTheBudget) {
  for (std::size_t share = 1; share < 10; ++share) {
    schedule = Schedule();
    const auto layers = newBlocks(50, 2 * kMiB);
    budget = share * 10 * kMiB;
    fetch(layers);
    fetch(layers);
    const auto first = stay(layers);
    for (int step = 0; step < 4; ++step) {
      fetch(layers);
      EXPECT_EQ(stay(layers), first);
    }
    std::size_t kept = 0;
    for (std::size_t k = 0; k < layers.size(); ++k) {
      kept += first[k] ? 1 : 0;
      // Never more than one away from the straight line.
      EXPECT_NEAR(static_cast<double>(kept), static_cast<double>((k + 1) * share) / 10.0, 1.0) << k;
    }
    EXPECT_EQ(kept, 5 * share);
  }
}

TEST_F(ScheduleTest, ForwardAndBackwardShareOneSet) {
  budget = 16 * kMiB;
  const auto layers = newBlocks(8, 4 * kMiB);
  fetch(layers);
  fetch(reversed(layers));
  const auto first = stay(layers);
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(fetch(layers), 1) << step;
    EXPECT_EQ(stay(layers), first);
    EXPECT_EQ(fetch(reversed(layers)), 1);
    EXPECT_EQ(stay(layers), first);
  }
}

TEST_F(ScheduleTest, SmallOnesStayFirst) {
  budget = 9 * kMiB;
  std::vector<Block*> order;
  for (int layer = 0; layer < 4; ++layer) {
    order.push_back(&newBlock(4 * kMiB));
    order.push_back(&newBlock(kMiB / 4));
  }
  for (int step = 0; step < 2; ++step) fetch(order);
  EXPECT_EQ(stay(order), (std::vector<bool>{true, true, false, true, true, true, false, true}));
}

TEST_F(ScheduleTest, AnActivationIsNotPlannedFor) {
  budget = 8 * kMiB;
  const auto layers = newBlocks(4, 4 * kMiB);
  for (int step = 0; step < 3; ++step) {
    std::vector<Block*> order;
    for (Block* layer : layers) {
      Block& activation = newBlock(64 * kMiB, Born::Device);
      order.insert(order.end(), {layer, &activation, &activation});
      EXPECT_FALSE(stays(activation, true));
    }
    EXPECT_EQ(fetch(order), step == 0 ? 0 : 1) << "an activation that is used twice ends no pass";
  }
  EXPECT_EQ(stay(layers), (std::vector<bool>{true, false, true, false}));
}

TEST_F(ScheduleTest, AWeightThatWasBornOnTheDeviceCountsInTheEnd) {
  budget = 4 * kMiB;
  Block& weight = newBlock(4 * kMiB, Born::Device);
  Block& other = newBlock(4 * kMiB);
  for (int step = 0; step < 20; ++step) fetch({&weight, &other});
  EXPECT_NE(stays(weight), stays(other));
  budget = 8 * kMiB;
  schedule.plan(budget);
  EXPECT_TRUE(stays(weight));
}

TEST_F(ScheduleTest, OneExtentAgainAndAgainIsNoPass) {
  const auto layers = newBlocks(2, 4 * kMiB);
  EXPECT_EQ(fetch({layers[0], layers[0], layers[0], layers[1], layers[1]}), 0);
  EXPECT_EQ(fetch({layers[0]}), 1);
}

TEST_F(ScheduleTest, WhatIsForgottenMakesRoom) {
  budget = 16 * kMiB;
  const auto layers = newBlocks(8, 4 * kMiB);
  for (int step = 0; step < 2; ++step) fetch(layers);
  for (std::size_t k = 4; k < 8; ++k) schedule.forget(*layers[k]);
  const std::vector<Block*> rest(layers.begin(), layers.begin() + 4);
  schedule.plan(budget);
  EXPECT_EQ(stay(rest), (std::vector<bool>{true, true, true, true}));
}

TEST_F(ScheduleTest, ASmallerModelTakesOverFromOneThatIsGone) {
  budget = 4 * kMiB;
  const auto large = newBlocks(8, 4 * kMiB);
  for (int step = 0; step < 2; ++step) fetch(large);
  for (const Block* layer : large) schedule.forget(*layer);
  const auto small = newBlocks(2, 4 * kMiB);
  for (int step = 0; step < 3; ++step) fetch(small);
  EXPECT_EQ(stay(small), (std::vector<bool>{true, false}));
}

TEST_F(ScheduleTest, AModelThatIsNotUsedAnyMoreLeavesThePlan) {
  budget = 16 * kMiB;
  const auto encoder = newBlocks(4, 4 * kMiB);
  const auto denoiser = newBlocks(8, 4 * kMiB);
  const auto kept = [this](const std::vector<Block*>& layers) {
    return std::count_if(layers.begin(), layers.end(), [this](const Block* layer) { return stays(*layer); });
  };
  const auto letGo = [this](const Block* layer) { return !stays(*layer, true); };
  for (int image = 0; image < 3; ++image) {
    fetch(encoder);
    fetch(denoiser);
    fetch({denoiser[0]});
    EXPECT_EQ(kept(encoder) + kept(denoiser), 4) << image;
    EXPECT_GE(kept(encoder), 1) << "it has been used just now " << image;
    int steps = 0;
    while (kept(denoiser) < 4 && steps < 20) ++steps, fetch(denoiser);
    EXPECT_GE(steps, 2) << image;
    EXPECT_LE(steps, 8) << image;
    EXPECT_TRUE(std::all_of(encoder.begin(), encoder.end(), letGo)) << image;
    fetch(denoiser);
    EXPECT_TRUE(std::none_of(encoder.begin(), encoder.end(), letGo)) << "it is as good as new " << image;
  }
}

TEST_F(ScheduleTest, ALoopWithinAStepIsNoReasonToDropTheRest) {
  budget = 16 * kMiB;
  const auto layers = newBlocks(6, 4 * kMiB);
  const auto cell = newBlocks(2, 4 * kMiB);
  for (int step = 0; step < 4; ++step) {
    fetch({layers[0], layers[1], layers[2]});
    for (int word = 0; word < 100; ++word) {
      for (Block* block : cell) {
        if (schedule.record(*block, {0, block->bytes})) schedule.plan(budget); // a hit, be it of the ring
      }
    }
    fetch({layers[3], layers[4], layers[5]});
    if (step == 0) continue;
    const auto kept = stay(layers);
    EXPECT_GE(std::count(kept.begin(), kept.end(), true), 2) << step;
  }
}

TEST_F(ScheduleTest, WhatALongerPassReplacesIsLetGo) {
  budget = 16 * kMiB;
  const auto small = newBlocks(4, 4 * kMiB);
  const auto large = newBlocks(8, 4 * kMiB);
  for (int step = 0; step < 2; ++step) fetch(small);
  EXPECT_EQ(stay(small), (std::vector<bool>{true, true, true, true}));
  fetch({small[0]}); // ends the pass of the small ones, which the large ones would else be part of
  fetch(large);
  fetch({large[0]});
  for (std::size_t k = 1; k < 4; ++k) EXPECT_FALSE(stays(*small[k], true)) << k;
}

TEST_F(ScheduleTest, AnOrderWithoutAnEndIsForgottenInTime) {
  budget = kMiB;
  Block& table = newBlock(std::size_t{1} << 40);
  int ended = 0;
  for (std::size_t row = 0; row < (std::size_t{1} << 18); ++row) {
    if (schedule.record(table, {row * 1024, row * 1024 + 512})) {
      schedule.plan(budget);
      ++ended;
    }
  }
  EXPECT_EQ(ended, 3);
  EXPECT_LE(schedule.entryCount(), std::size_t{3} << 16); // of the plan, the one before it and the pass that has begun
}

} // namespace
} // namespace offload
