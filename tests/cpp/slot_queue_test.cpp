// Which Slot goes first, of those that pass through.
#include "core/slot_queue.h"

#include <gtest/gtest.h>

#include <deque>

#include "core/block.h"

namespace offload {
namespace {

constexpr std::size_t kBytes = 1024;

class SlotQueueTest : public ::testing::Test {
 protected:
  ~SlotQueueTest() override {
    for (Block& block : blocks_) block.slots.clear();
  }
  /// One that holds the newest bytes, and that nothing pins.
  std::shared_ptr<Slot> newSlot() {
    Block& block = blocks_.emplace_back(nullptr, kBytes, BlockKind::Pinned, Born::Host, 0);
    auto slot = std::make_shared<Slot>();
    slot->block = &block;
    slot->extent = {0, kBytes};
    slot->buffer.bytes = kBytes;
    queue_.add(slot, Share::Passing);
    slot->become(SlotState::Clean);
    block.slots.push_back(slot);
    Slots retired;
    queue_.unpin(slot, true, retired);
    EXPECT_TRUE(retired.empty());
    return slot;
  }
  std::shared_ptr<Slot> newDirty() {
    auto slot = newSlot();
    slot->become(SlotState::Dirty);
    queue_.move(slot, Share::Dirty);
    return slot;
  }
  /// What goes if `slots` of these are to be left.
  Slots goes(std::size_t slots) {
    Slots retired;
    queue_.makeRoom(0, slots * kBytes, retired);
    return retired;
  }

  std::deque<Block> blocks_;
  SlotQueue queue_;
};

TEST_F(SlotQueueTest, WhatHasPassedGoesBeforeWhatIsExpected) {
  const auto expected = newSlot();
  const auto first = newSlot();
  const auto second = newSlot();
  queue_.expect(expected, 5);
  EXPECT_EQ(goes(2), Slots{first});
  EXPECT_EQ(goes(1), Slots{second});
  EXPECT_EQ(goes(0), Slots{expected});
}

TEST_F(SlotQueueTest, WhatIsExpectedLastGoesFirst) {
  const auto soon = newSlot();
  const auto late = newSlot();
  queue_.expect(late, 9);
  queue_.expect(soon, 4);
  EXPECT_EQ(goes(1), Slots{late});
}

TEST_F(SlotQueueTest, OfSeveralFetchesThatWantASlotTheNextOneCounts) {
  const auto twice = newSlot();
  const auto once = newSlot();
  queue_.expect(twice, 5);
  queue_.expect(once, 10);
  queue_.expect(twice, 20);
  EXPECT_EQ(goes(1), Slots{once});
}

TEST_F(SlotQueueTest, OnceThatHasBeenTheLatestCounts) {
  const auto twice = newSlot();
  const auto once = newSlot();
  queue_.expect(twice, 5);
  queue_.expect(once, 10);
  queue_.expect(twice, 20);
  queue_.advance(5);
  EXPECT_EQ(goes(1), Slots{twice});
}

TEST_F(SlotQueueTest, WhatIsDirtyIsLookedThroughOnceForWhatIsUnused) {
  const auto early = newDirty();
  queue_.advance(10);
  const auto late = newDirty();
  EXPECT_EQ(queue_.oldestDirty(false, 5), early);
  Slots retired;
  queue_.pin(early);
  queue_.unpin(early, true, retired);
  EXPECT_EQ(queue_.oldestDirty(false, 10), nullptr);
  // Behind the queue's back: whoever looked again would see it.
  late->lastUse = 0;
  EXPECT_EQ(queue_.oldestDirty(false, 10), nullptr);
  late->lastUse = 10;
  EXPECT_EQ(queue_.oldestDirty(false, 11), early);
}

TEST_F(SlotQueueTest, WhatBecomesDirtyLaterIsLookedAtWheneverItWasUsed) {
  const auto clean = newSlot();
  queue_.advance(10);
  const auto dirty = newDirty();
  EXPECT_EQ(queue_.oldestDirty(false, 10), nullptr);
  clean->become(SlotState::Dirty);
  queue_.move(clean, Share::Dirty);
  EXPECT_EQ(queue_.oldestDirty(false, 10), clean);
  EXPECT_EQ(queue_.oldestDirty(false, UINT64_MAX), dirty);
}

TEST_F(SlotQueueTest, NothingIsExpectedAnyMore) {
  const auto first = newSlot();
  const auto second = newSlot();
  queue_.expect(first, 5);
  queue_.expectNothing();
  EXPECT_FALSE(queue_.isExpected(*first));
  EXPECT_EQ(goes(1), Slots{first}) << "and goes before what has passed";
  EXPECT_EQ(goes(0), Slots{second});
}

} // namespace
} // namespace offload
