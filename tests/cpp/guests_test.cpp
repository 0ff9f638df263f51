// What is changed together stays together, in the room that the plan leaves.
#include "core/guests.h"

#include <gtest/gtest.h>

#include <deque>

#include "core/block.h"
#include "core/schedule.h"

namespace offload {
namespace {

class GuestsTest : public ::testing::Test {
 protected:
  using Group = std::vector<Block*>;

  Block& newBlock(std::size_t bytes) {
    return blocks_.emplace_back(nullptr, bytes, BlockKind::Pinned, Born::Host, 0);
  }
  Group newGroup(std::size_t bytes) {
    return {&newBlock(bytes), &newBlock(bytes)};
  }
  bool admit(const Group& group, std::size_t budget, std::size_t readBytes = 0) {
    return schedule.admit(group, readBytes, budget);
  }
  bool stays(const Block& block) const {
    return schedule.keeps(block, {0, block.bytes}, true);
  }
  bool stays(const Group& group) const {
    EXPECT_EQ(stays(*group[0]), stays(*group[1]));
    return stays(*group[0]);
  }
  void fetch(const Group& order, std::size_t budget) {
    for (Block* block : order) {
      if (schedule.record(*block, {0, block->bytes})) schedule.plan(budget);
    }
  }

  Schedule schedule;

 private:
  std::deque<Block> blocks_;
};

TEST_F(GuestsTest, TheFirstThatFitStay) {
  const Group one = newGroup(100);
  const Group two = newGroup(100);
  for (int step = 0; step < 2; ++step) {
    EXPECT_TRUE(admit(one, 300, 50));
    EXPECT_FALSE(admit(two, 300, 50)) << "what is read beside counts as well";
  }
  EXPECT_TRUE(stays(one));
  EXPECT_FALSE(stays(two));
  EXPECT_TRUE(admit(two, 500, 50));
  EXPECT_TRUE(stays(two));
}

TEST_F(GuestsTest, ThePlanComesFirstAndIsCountedOnce) {
  const Group weights{&newBlock(1000), &newBlock(1000)};
  fetch(weights, 3000);
  fetch(weights, 3000); // ends a pass: both stay
  Block& state = newBlock(500);
  EXPECT_TRUE(admit({weights[0], &state}, 3000, 500));
  EXPECT_FALSE(admit({weights[1], &newBlock(500)}, 3000, 500));
  EXPECT_TRUE(stays(*weights[1])) << "the plan's";
}

TEST_F(GuestsTest, WhatThePlanDoesNotKeepIsNotAdmitted) {
  const Group weights{&newBlock(2 << 20), &newBlock(2 << 20)};
  fetch(weights, 3 << 20);
  fetch(weights, 3 << 20);
  for (Block* weight : weights) {
    EXPECT_EQ(admit({weight, &newBlock(100)}, 3 << 20), stays(*weight));
  }
  EXPECT_NE(stays(*weights[0]), stays(*weights[1]));
}

TEST_F(GuestsTest, AWeightThatIsRefusedStaysWhereAnyOtherWould) {
  Block& weight = newBlock(100);
  Block& state = newBlock(1000);
  schedule.record(weight, {0, 100});
  EXPECT_FALSE(admit({&weight, &state}, 500));
  EXPECT_TRUE(stays(weight));
  EXPECT_FALSE(stays(state));
}

TEST_F(GuestsTest, WhoIsDismissedWaitsForAnotherPlan) {
  const Group one = newGroup(100);
  EXPECT_TRUE(admit(one, 300));
  schedule.dismiss(*one[1]);
  EXPECT_FALSE(admit(one, 300));
  EXPECT_FALSE(stays(one));
  schedule.plan(300);
  EXPECT_TRUE(admit(one, 300));
}

TEST_F(GuestsTest, ALargerPlanShowsTheLatestOut) {
  const Group one = newGroup(100);
  const Group two = newGroup(100);
  EXPECT_TRUE(admit(one, 500));
  EXPECT_TRUE(admit(two, 500));
  const Group weights{&newBlock(200)};
  fetch(weights, 500);
  fetch({weights[0], &newBlock(10), weights[0]}, 500);
  EXPECT_TRUE(stays(one));
  EXPECT_FALSE(stays(two));
  EXPECT_FALSE(admit(two, 500));
  EXPECT_TRUE(admit(two, 610));
}

TEST_F(GuestsTest, ASmallerBudgetShowsTheLatestOutToo) {
  const Group one = newGroup(100);
  const Group two = newGroup(100);
  EXPECT_TRUE(admit(one, 400));
  EXPECT_TRUE(admit(two, 400));
  EXPECT_TRUE(schedule.plan(300));
  EXPECT_TRUE(stays(one));
  EXPECT_FALSE(stays(two));
  EXPECT_FALSE(schedule.plan(300)) << "no other choice";
}

TEST_F(GuestsTest, WhatIsGoneLeavesItsRoom) {
  const Group one = newGroup(100);
  const Group two = newGroup(100);
  EXPECT_TRUE(admit(one, 200));
  EXPECT_FALSE(admit(two, 200));
  schedule.forget(*one[1]);
  EXPECT_TRUE(admit(two, 200));
  schedule.forget(*one[0]);
  schedule.forget(*two[0]);
  schedule.forget(*two[1]);
  EXPECT_TRUE(admit(newGroup(100), 200));
}

TEST_F(GuestsTest, NewStateOfAWeightTakesThePlaceOfTheOld) {
  Block& weight = newBlock(100);
  Block& state = newBlock(100);
  EXPECT_TRUE(admit({&weight, &state}, 200));
  Block& other = newBlock(100);
  EXPECT_TRUE(admit({&weight, &other}, 200));
  EXPECT_TRUE(stays(other));
  EXPECT_FALSE(stays(state));
}

} // namespace
} // namespace offload
