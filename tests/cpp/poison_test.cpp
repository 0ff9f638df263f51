// Poison: memory that is given up holds other bytes, and what comes again comes elsewhere.
#include <map>
#include <utility>

#include "residency_rig.h"

namespace offload {
namespace {

using namespace core_test;

// What TORCH_OFFLOAD_EVICT and TORCH_OFFLOAD_POISON do together: at its last unpin a Slot is poisoned, and its bytes come back elsewhere.
TEST(Poison, WhatIsPoisonedAtItsLastUnpinComesBackElsewhere) {
  CoreOptions options = ringOf(8 * 1024);
  options.cache.evictAtUnpin = true;
  options.cache.poison = true;
  options.sim.deviceBytes = 1 << 16;
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto one = rig.newBlock(pattern(1, 1000));
        const auto two = rig.newBlock(pattern(2, 1000));
        std::map<const Block*, const void*> before;
        for (int use = 0; use < 12; ++use) {
          // Each by itself, both in turn, and one that others have pinned for a while.
          Block& block = use % 3 == 2 ? *two : *one;
          const Pin pin = rig.cache.fetch(block, {0, 1000}, stream);
          EXPECT_NE(pin.data(), std::exchange(before[&block], pin.data())) << "use " << use;
          const Pin again = rig.cache.fetch(block, {0, 1000}, stream);
          EXPECT_EQ(again.data(), pin.data()) << "what is pinned stays where it is";
          const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
          rig.sim.drain();
          EXPECT_EQ(*seen, pattern(&block == two.get() ? 2 : 1, 1000));
        }
      },
      options);
}

// Copies that are ahead, too.
TEST(Poison, WhatIsCopiedAheadComesBackElsewhere) {
  CoreOptions options = ringOf(4 * 1024);
  options.cache.poison = true;
  options.sim.deviceBytes = 1 << 16;
  onEverySeed(
      [](Rig& rig, Stream stream) {
        std::vector<Rig::BlockPtr> layers;
        for (std::uint64_t k = 0; k < 10; ++k) layers.push_back(rig.newBlock(pattern(k, 1000)));
        std::vector<const void*> before(layers.size());
        for (int pass = 0; pass < 6; ++pass) {
          for (std::size_t k = 0; k < layers.size(); ++k) {
            const Pin pin = rig.cache.fetch(*layers[k], {0, 1000}, stream);
            EXPECT_NE(pin.data(), std::exchange(before[k], pin.data())) << "layer " << k << ", pass " << pass;
          }
        }
        EXPECT_GE(rig.cache.stats(0).prefetches, 30U);
      },
      options);
}

TEST(Poison, WhereThereIsNoOtherPlaceItStaysInItsOwn) {
  CoreOptions options = ringOf(1024);
  options.cache.evictAtUnpin = true;
  options.cache.poison = true;
  options.sim.deviceBytes = 1024;
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto block = rig.newBlock(pattern(1, 1000));
        for (int use = 0; use < 4; ++use) {
          const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
          const auto seen = rig.readOnDevice(stream, pin.data(), 1000);
          rig.sim.drain();
          EXPECT_EQ(*seen, pattern(1, 1000));
        }
      },
      options);
}

} // namespace
} // namespace offload
