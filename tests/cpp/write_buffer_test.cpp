// Results that the budget has no room for, and that wait in a part of the ring before they go home.
#include "residency_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 1024;

/// With room for two results, of a ring for eight.
CoreOptions withBuffer(std::size_t budget = 1) {
  CoreOptions options = ringOf(8 * kBytes);
  options.cache.budgetBytes = budget;
  options.cache.writeBufferShare = 0.25;
  return options;
}

Rig::BlockPtr newResult(Rig& rig, Stream stream, std::uint64_t seed) {
  auto block = rig.newBlock(kBytes, Born::Device);
  rig.cache.adopt(*block, rig.newResult(stream, pattern(seed, kBytes)), stream);
  return block;
}

std::uint64_t sentHome(Rig& rig) {
  return rig.cache.transferStats(0).bytesToHost / kBytes;
}

TEST(WriteBuffer, WhatDiesInItNeverGoesHome) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        auto last = newResult(rig, stream, 0);
        for (std::uint64_t k = 1; k < 10; ++k) {
          auto next = newResult(rig, stream, k);
          const auto hits = rig.cache.stats(0).hits;
          const Pin pin = rig.cache.fetch(*last, {0, kBytes}, stream);
          EXPECT_EQ(rig.cache.stats(0).hits, hits + 1);
          const auto seen = rig.readOnDevice(stream, pin.data(), kBytes);
          rig.sim.drain();
          EXPECT_EQ(*seen, pattern(k - 1, kBytes));
          last = std::move(next);
        }
        EXPECT_EQ(sentHome(rig), 0U);
        EXPECT_EQ(rig.read(*last), pattern(9, kBytes));
        EXPECT_EQ(sentHome(rig), 1U);
      },
      withBuffer());
}

TEST(WriteBuffer, TheOldestGoesForWhatIsMore) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        std::vector<Rig::BlockPtr> results;
        for (std::uint64_t k = 0; k < 3; ++k) results.push_back(newResult(rig, stream, k));
        EXPECT_EQ(sentHome(rig), 1U);
        EXPECT_EQ(results[0]->hostVersion, results[0]->version);
        EXPECT_LT(results[1]->hostVersion, results[1]->version);
        EXPECT_LT(results[2]->hostVersion, results[2]->version);
        rig.cache.fetch(*results[0], {0, kBytes}, stream);
        EXPECT_EQ(rig.cache.transferStats(0).copiesToDevice, 0U) << "it is there until the ring wants its place";
        for (std::uint64_t k = 0; k < 3; ++k) EXPECT_EQ(rig.read(*results[k]), pattern(k, kBytes));
      },
      withBuffer());
}

TEST(WriteBuffer, TakesNothingOfTheBudget) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto first = newResult(rig, stream, 1);
        const auto second = newResult(rig, stream, 2);
        const auto weight = rig.newBlock(pattern(3, kBytes));
        rig.cache.fetch(*weight, {0, kBytes}, stream);
        EXPECT_EQ(rig.cache.stats(0).stayingBytes, kBytes);
        EXPECT_EQ(rig.cache.stats(0).dirtyBytes, 2 * kBytes);
        const auto third = newResult(rig, stream, 4);
        EXPECT_EQ(rig.cache.stats(0).stayingBytes, kBytes) << "the weight doesn't go for it";
        EXPECT_EQ(sentHome(rig), 1U);
      },
      withBuffer(kBytes));
}

TEST(WriteBuffer, ABudgetHoldsMore) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        std::vector<Rig::BlockPtr> results;
        for (std::uint64_t k = 0; k < 4; ++k) results.push_back(newResult(rig, stream, k));
        EXPECT_EQ(sentHome(rig), 0U);
        results.push_back(newResult(rig, stream, 4));
        EXPECT_EQ(sentHome(rig), 1U);
      },
      withBuffer(2 * kBytes));
}

TEST(WriteBuffer, IsPartOfTheRing) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto first = newResult(rig, stream, 1);
        const auto second = newResult(rig, stream, 2);
        std::vector<Rig::BlockPtr> weights;
        for (std::uint64_t k = 0; k < 10; ++k) {
          weights.push_back(rig.newBlock(pattern(k, kBytes)));
          rig.cache.fetch(*weights.back(), {0, kBytes}, stream);
          EXPECT_LE(rig.cache.stats(0).slotBytes, 8 * kBytes);
        }
        EXPECT_EQ(rig.cache.stats(0).dirtyBytes, 2 * kBytes);
        EXPECT_EQ(sentHome(rig), 0U);
      },
      withBuffer());
}

TEST(WriteBuffer, TogetherWithWhatIsOnItsWayHomeItTakesHalfOfTheRing) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        std::vector<Rig::BlockPtr> weights;
        for (std::uint64_t k = 0; k < 4; ++k) {
          weights.push_back(rig.newBlock(pattern(k, kBytes)));
          rig.cache.fetch(*weights.back(), {0, kBytes}, stream);
        }
        std::vector<Rig::BlockPtr> results;
        for (std::uint64_t k = 0; k < 5; ++k) results.push_back(newResult(rig, stream, k));
        const auto slots = [](const auto& blocks) {
          return std::count_if(blocks.begin(), blocks.end(), [](const auto& block) { return !block->slots.empty(); });
        };
        EXPECT_EQ(slots(weights), 3) << "one went before any result did";
        EXPECT_EQ(slots(results), 5);
        results.push_back(newResult(rig, stream, 5));
        EXPECT_EQ(slots(weights), 3);
        EXPECT_EQ(slots(results), 5) << "two wait, and three are on their way or home: more than half";
      },
      withBuffer());
}

TEST(WriteBuffer, IsEmptiedWithTheCacheAndGoesWithTheRing) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto first = newResult(rig, stream, 1);
        EXPECT_EQ(rig.cache.emptyCache(0), kBytes);
        EXPECT_EQ(sentHome(rig), 1U);
        EXPECT_EQ(rig.read(*first), pattern(1, kBytes));
        const auto second = newResult(rig, stream, 2);
        const auto third = newResult(rig, stream, 3);
        EXPECT_EQ(sentHome(rig), 1U);
        rig.cache.setRingBytes(4 * kBytes);
        EXPECT_EQ(sentHome(rig), 2U);
        rig.cache.setRingBytes(0);
        EXPECT_EQ(sentHome(rig), 3U);
        EXPECT_EQ(rig.read(*second), pattern(2, kBytes));
        EXPECT_EQ(rig.read(*third), pattern(3, kBytes));
      },
      withBuffer());
}

TEST(WriteBuffer, ABudgetOfNothingWritesThrough) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto first = newResult(rig, stream, 1);
        EXPECT_EQ(sentHome(rig), 0U);
        rig.cache.setBudget(0);
        EXPECT_EQ(sentHome(rig), 1U);
        const auto second = newResult(rig, stream, 2);
        EXPECT_EQ(sentHome(rig), 2U);
        rig.cache.setBudget(1);
        const auto third = newResult(rig, stream, 3);
        EXPECT_EQ(sentHome(rig), 2U);
        EXPECT_EQ(rig.read(*first), pattern(1, kBytes));
        EXPECT_EQ(rig.read(*second), pattern(2, kBytes));
        EXPECT_EQ(rig.read(*third), pattern(3, kBytes));
      },
      withBuffer());
}

TEST(WriteBuffer, WhatIsToGoHomeAtOnceDoes) {
  onEverySeed(
      [](Rig& rig, Stream stream) {
        const auto saved = rig.newBlock(kBytes, Born::Device);
        saved->goesHome = true;
        rig.cache.adopt(*saved, rig.newResult(stream, pattern(1, kBytes)), stream);
        EXPECT_EQ(sentHome(rig), 1U);
        const auto gradient = rig.newBlock(kBytes, Born::Device);
        gradient->purpose = Purpose::Gradient;
        gradient->derivedFrom = &rig;
        rig.cache.adopt(*gradient, rig.newResult(stream, pattern(2, kBytes)), stream);
        EXPECT_EQ(sentHome(rig), 2U);
      },
      withBuffer());
}

} // namespace
} // namespace offload
