// Copies that a caller asks for ahead of his own fetch, results that go home at once, and who owns what a Pin shows.
#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::uint64_t kManySeeds = 200;
constexpr std::size_t kBytes = 1000;

template <class Body>
void onEverySeed(Body body) {
  for (std::uint64_t seed = 0; seed < kManySeeds; ++seed) {
    Rig rig({{.seed = seed}});
    ASSERT_NO_THROW(body(rig, rig.sim.createStream(0))) << "seed " << seed;
    ASSERT_NO_THROW(rig.sim.drain()) << "seed " << seed;
    rig.cache.emptyCache(0);
    ASSERT_EQ(rig.sim.bytesInUse(0), 0U) << "seed " << seed;
    ASSERT_TRUE(rig.sim.reports().empty()) << "seed " << seed << ": " << rig.sim.reports().front();
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

TEST(FetchAhead, TheFetchFindsTheCopyAndWaitsForIt) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, kBytes));
    Pin ahead = rig.cache.fetchAhead(*block, {0, kBytes}, stream);
    const Pin pin = rig.cache.fetch(*block, {100, kBytes}, stream);
    ahead = {};
    EXPECT_EQ(rig.cache.transferStats(0).copiesToDevice, 1U);
    EXPECT_EQ(rig.cache.stats(0).hits, 1U);
    const auto seen = rig.readOnDevice(stream, pin.data(), 900);
    rig.sim.drain();
    EXPECT_EQ(std::memcmp(seen->data(), pattern(1, kBytes).data() + 100, 900), 0);
  });
}

// A copy that was made because the order said so: whoever asks for it ahead of his fetch wants it as well.
TEST(FetchAhead, WhatItFindsWasNotCopiedForNothing) {
  const auto wasted = [](bool asks) {
    CoreOptions options;
    options.cache.ringBytes = 4 * kBytes;
    Rig rig(options);
    std::vector<Rig::BlockPtr> layers;
    for (std::uint64_t k = 0; k < 10; ++k) layers.push_back(rig.newBlock(pattern(k, kBytes)));
    for (int pass = 0; pass < 3; ++pass) {
      for (const auto& layer : layers) rig.cache.fetch(*layer, {0, kBytes}, {});
    }
    rig.cache.fetch(*layers[0], {0, kBytes}, {});
    if (asks) rig.cache.fetchAhead(*layers[1], {0, kBytes}, {});
    rig.cache.emptyCache(0);
    return rig.cache.stats(0).prefetchesWasted;
  };
  EXPECT_GT(wasted(false), 0U);
  EXPECT_EQ(wasted(true), wasted(false) - 1);
}

TEST(FetchAhead, WhatIsWrittenMeanwhileIsCopiedAgain) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(pattern(1, kBytes));
    const Pin ahead = rig.cache.fetchAhead(*block, {0, kBytes}, stream);
    rig.write(*block, pattern(2, kBytes));
    const Pin pin = rig.cache.fetch(*block, {0, kBytes}, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), kBytes);
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(2, kBytes));
  });
}

TEST(FetchAhead, FindsWhatIsThere) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(kBytes);
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, kBytes)), stream);
    const Pin ahead = rig.cache.fetchAhead(*block, {0, kBytes}, stream);
    EXPECT_EQ(rig.cache.transferStats(0).copiesToDevice, 0U);
    EXPECT_EQ(rig.cache.stats(0).fetches, 0U); // those are the program's own
  });
}

TEST(GoesHome, AResultIsCopiedAtOnceAndItsMemoryGivenUpForWhatComes) {
  onEverySeed([](Rig& rig, Stream stream) {
    const auto block = rig.newBlock(kBytes, Born::Device);
    block->goesHome = true;
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, kBytes)), stream);
    EXPECT_EQ(rig.cache.transferStats(0).bytesToHost, kBytes);
    EXPECT_EQ(rig.cache.stats(0).dirtyBytes, 0U);
    rig.cache.emptyCache(0);
    EXPECT_EQ(rig.owned, 0);
    const Pin pin = rig.cache.fetch(*block, {0, kBytes}, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), kBytes);
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(1, kBytes));
  });
}

TEST(RetainSource, CountsOneMoreOwnerOfTheBlockWhoseNewestBytesThePinShows) {
  Rig rig;
  const Stream stream = rig.sim.createStream(0);
  auto block = rig.newBlock(pattern(1, kBytes));
  const Pin pin = rig.cache.fetch(*block, {0, kBytes}, stream);
  EXPECT_EQ(rig.cache.retainSource(pin), block.get());
  EXPECT_EQ(block->owners, 2);
  rig.write(*block, pattern(2, kBytes));
  EXPECT_EQ(rig.cache.retainSource(pin), nullptr);
  const Pin newer = rig.cache.fetch(*block, {0, kBytes}, stream);
  block->owners = 0; // as when the last owner has let go and is about to say so
  EXPECT_EQ(rig.cache.retainSource(newer), nullptr);
  block.reset();
  EXPECT_EQ(rig.cache.retainSource(newer), nullptr);
  EXPECT_EQ(rig.cache.retainSource(Pin()), nullptr);
}

} // namespace
} // namespace offload
