// What it costs where the fetches that the Schedule expects don't come, and that it learns.
#include "prefetch_rig.h"

namespace offload {
namespace {

using namespace prefetch_test;

TEST_F(Prefetch, ALayerThatIsLeftOutCostsOneCopy) {
  make(10, 4);
  for (int step = 0; step < 3; ++step) forward();
  const std::uint64_t before = copies();
  for (std::size_t k = 0; k < layers_.size(); ++k) {
    if (k != 5) use(k);
  }
  forward();
  EXPECT_LE(copies() - before, 21U);
  EXPECT_LE(stats().prefetchesWasted, 2U) << "the second time it was not expected";
  checkValues();
}

// A wrong guess is one, however many copies had been made for it.
TEST_F(Prefetch, APassThatIsCutShortIsForgotten) {
  make(12, 8);
  for (int step = 0; step < 3; ++step) forward();
  for (std::size_t k = 0; k < 6; ++k) use(k);
  const auto missesOfAPass = [this] {
    const auto before = stats();
    forward();
    return stats().fetches - before.fetches - (stats().hits - before.hits);
  };
  EXPECT_LE(missesOfAPass(), 4U);
  EXPECT_LE(missesOfAPass(), 2U) << "where the short one ended";
  EXPECT_LE(missesOfAPass(), 2U);
  EXPECT_EQ(missesOfAPass(), 0U);
  checkValues();
}

TEST_F(Prefetch, AnotherOrderCostsNoMoreThanTheRingAndIsLearned) {
  make(10, 4);
  for (int step = 0; step < 3; ++step) forward();
  const std::uint64_t before = copies();
  for (int step = 0; step < 4; ++step) {
    for (const std::size_t k : {3U, 1U, 4U, 9U, 5U, 2U, 6U, 8U, 7U, 0U}) use(k);
  }
  EXPECT_LE(copies() - before, 40U + 8U);
  const std::uint64_t hits = stats().hits;
  for (const std::size_t k : {3U, 1U, 4U, 9U, 5U, 2U, 6U, 8U, 7U, 0U}) use(k);
  EXPECT_EQ(stats().hits, hits + 10);
  checkValues();
}

TEST_F(Prefetch, AnOrderThatCanNotBeToldIsStreamed) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    make(12, 3, seed);
    SimRandom random(seed);
    for (int k = 0; k < 600; ++k) use(random.below(12));
    EXPECT_LE(stats().prefetchesWasted, 600U / 20) << "seed " << seed;
    checkValues();
  }
}

// Each step has a part that is always the same, after which every guess is wrong: soon none is made.
TEST_F(Prefetch, GuessesThatAreWrongAgainAndAgainAreNotMade) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    make(24, 6, seed);
    SimRandom random(seed);
    const auto step = [&] {
      for (std::size_t k = 0; k < 5; ++k) use(k);
      for (int k = 0; k < 5; ++k) use(5 + random.below(19));
    };
    for (int k = 0; k < 50; ++k) step();
    const std::uint64_t wasted = stats().prefetchesWasted;
    for (int k = 0; k < 50; ++k) step();
    EXPECT_LE(wasted, 8U) << "seed " << seed;
    EXPECT_LE(stats().prefetchesWasted - wasted, 5U) << "seed " << seed;
    checkValues();
  }
}

// Experts, some of which are asked for much more often than others: the ring finds again what came last.
TEST_F(Prefetch, AnOrderThatCanNotBeToldLeavesWhatIsUsedOftenInTheRing) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    std::uint64_t copied[2];
    for (const bool prefetch : {false, true}) {
      make(16, 8, seed, 0, prefetch);
      SimRandom random(seed);
      for (int k = 0; k < 1000; ++k) {
        std::size_t layer = 0;
        while (layer < 15 && random.below(3) > 0) ++layer;
        use(layer);
      }
      copied[prefetch] = copies();
      checkValues();
    }
    EXPECT_LE(copied[true], copied[false] * 11 / 10) << "seed " << seed;
  }
}

} // namespace
} // namespace offload
