// The list of a Block's Slots: whatever has been listed and taken off, the same is found as by a walk over all.
#include "core/slot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/block.h"

namespace offload {
namespace {

constexpr std::size_t kBytes = 64;

std::shared_ptr<Slot> newSlot(Block& block, Extent extent, int device = 0) {
  auto slot = std::make_shared<Slot>();
  slot->block = &block;
  slot->extent = extent;
  slot->device = device;
  slot->version = block.version;
  listSlot(slot);
  return slot;
}

bool isWanted(const Slot& slot, const Block& block, Extent extent, int device) {
  return slot.device == device && slot.version == block.version && slot.extent.contains(extent);
}

TEST(Slot, OneThatHoldsTheNewestBytesIsFound) {
  std::minstd_rand random(1);
  const auto below = [&random](std::size_t number) { return random() % number; };
  Block block(nullptr, kBytes, BlockKind::Pinned, Born::Host, 0);
  std::vector<std::shared_ptr<Slot>> all;
  std::size_t found = 0;
  for (int step = 0; step < 20'000; ++step) {
    const std::size_t begin = below(kBytes);
    const std::size_t most = std::min(kBytes - begin, step % 1000 < 900 ? std::size_t{4} : kBytes);
    const Extent extent{begin, begin + 1 + below(most)};
    const int device = static_cast<int>(below(2));
    if (all.size() < 40 && below(2) == 0) {
      all.push_back(newSlot(block, below(30) == 0 ? Extent{0, kBytes} : extent, device));
    } else if (!all.empty() && below(3) == 0) {
      const auto gone = all.begin() + static_cast<std::ptrdiff_t>(below(all.size()));
      unlistSlot(*gone);
      unlistSlot(*gone); // which it isn't any more
      all.erase(gone);
    } else if (below(50) == 0) {
      ++block.version;
    }
    ASSERT_EQ(block.slots.size(), all.size());
    const auto slot = newestSlot(block, extent, device);
    const bool any = std::ranges::any_of(all, [&](const auto& one) { return isWanted(*one, block, extent, device); });
    ASSERT_EQ(slot != nullptr, any) << "step " << step;
    ASSERT_TRUE(!any || isWanted(*slot, block, extent, device)) << "step " << step;
    found += any;
  }
  EXPECT_GT(found, 1000U);
  block.slots.clear();
}

TEST(Slot, ManyAreListedInTheOrderOfTheirExtents) {
  Block block(nullptr, kBytes, BlockKind::Pinned, Born::Host, 0);
  const auto last = newSlot(block, {40, 44});
  const auto first = newSlot(block, {0, 4});
  const auto second = newSlot(block, {0, 8});
  EXPECT_EQ(block.slots, (std::vector{first, second, last}));
  EXPECT_EQ(block.longest, 8U);
  unlistSlot(first);
  unlistSlot(second);
  unlistSlot(last);
  EXPECT_TRUE(block.slots.empty());
  newSlot(block, {0, 2});
  EXPECT_EQ(block.longest, 2U);
  block.slots.clear();
}

} // namespace
} // namespace offload
