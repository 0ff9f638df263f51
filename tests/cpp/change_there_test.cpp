// Parts of Blocks that are changed in the cache's own memory, and stay there.
#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 1000;
constexpr std::size_t kBegin = 300;
constexpr std::size_t kPart = 200;

Bytes with(Bytes whole, const Bytes& part) {
  std::copy(part.begin(), part.end(), whole.begin() + kBegin);
  return whole;
}

/// A result in the cache, and parts of it that are changed.
struct Result {
  explicit Result(CoreOptions options) : rig(options), stream(rig.sim.createStream(0)) {
    block = rig.newBlock(kBytes, Born::Device);
    rig.cache.adopt(*block, rig.newResult(stream, truth), stream);
  }
  bool change(std::uint64_t tag, Stream on) {
    const Bytes part = pattern(tag, kPart);
    const bool done = rig.cache.changeThere(*block, on, [&](void* data, void* owner) {
      EXPECT_EQ(owner != nullptr, owned);
      rig.writeOnDevice(on, static_cast<std::byte*>(data) + kBegin, part);
      return true;
    });
    if (done) truth = with(truth, part);
    return done;
  }
  std::uint64_t copied() {
    const TransferStats stats = rig.cache.transferStats(0);
    return stats.bytesToHost + stats.bytesToDevice;
  }

  Rig rig;
  const Stream stream;
  Rig::BlockPtr block;
  Bytes truth = pattern(1, kBytes);
  bool owned = true; // by somebody else, as a result's memory is
};

TEST(ChangeThere, NothingMovesAndReadersSeeTheirVersion) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Result result(budgetAndSeed(5000, seed));
    const Stream reader = result.rig.sim.createStream(0);
    const Stream changer = result.rig.sim.createStream(0);
    std::vector<std::pair<std::shared_ptr<Bytes>, Bytes>> seen;
    const void* at = nullptr;
    for (std::uint64_t k = 0; k < 4; ++k) {
      {
        const Pin pin = result.rig.cache.fetch(*result.block, {0, kBytes}, reader);
        EXPECT_TRUE(at == nullptr || at == pin.data());
        at = pin.data();
        seen.emplace_back(result.rig.readOnDevice(reader, at, kBytes), result.truth);
      }
      ASSERT_TRUE(result.change(10 + k, k % 2 == 0 ? changer : result.stream)) << "seed " << seed;
      EXPECT_EQ(result.block->version, k + 2);
    }
    EXPECT_EQ(result.copied(), 0U);
    EXPECT_EQ(result.rig.cache.stats(0).dirtyBytes, kBytes);
    EXPECT_EQ(result.rig.read(*result.block), result.truth) << "seed " << seed;
    result.rig.sim.drain();
    for (const auto& [bytes, value] : seen) ASSERT_EQ(*bytes, value) << "seed " << seed;
  }
}

TEST(ChangeThere, WhatIsAtHomeTooIsNewerOnTheDeviceThen) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Result result(budgetAndSeed(5000, seed));
    const auto home = result.rig.cache.lease(*result.block, Access::Read).data(); // on its way there, maybe, when this ends
    ASSERT_NE(home, nullptr);
    ASSERT_TRUE(result.change(2, result.stream));
    EXPECT_EQ(result.rig.read(*result.block), result.truth) << "seed " << seed;
    // Written by the host, and fetched: memory of the cache's own.
    result.truth = pattern(3, kBytes);
    result.rig.write(*result.block, result.truth);
    EXPECT_FALSE(result.change(4, result.stream)) << "it is not there";
    result.rig.cache.fetch(*result.block, {0, kBytes}, result.stream);
    result.owned = false;
    ASSERT_TRUE(result.change(4, result.stream));
    EXPECT_EQ(result.rig.cache.stats(0).dirtyBytes, kBytes);
    EXPECT_EQ(result.rig.read(*result.block), result.truth) << "seed " << seed;
  }
}

TEST(ChangeThere, APartOfIt) {
  Result result(budgetAndSeed(5000));
  result.rig.cache.emptyCache(0);
  const Pin part = result.rig.cache.fetch(*result.block, {0, 512}, result.stream);
  EXPECT_FALSE(result.change(2, result.stream)) << "is all that the cache has";
  EXPECT_EQ(result.rig.read(*result.block), result.truth);
}

TEST(ChangeThere, WhatSomebodyElseUsesIsLeftToTheCaller) {
  Result result(budgetAndSeed(5000));
  const std::uint64_t version = result.block->version;
  {
    const Pin pin = result.rig.cache.fetch(*result.block, {0, kBytes}, result.stream);
    EXPECT_FALSE(result.change(2, result.stream));
  }
  {
    const HostLease lease = result.rig.cache.lease(*result.block, Access::Read);
    EXPECT_FALSE(result.change(2, result.stream));
  }
  EXPECT_FALSE(result.rig.cache.changeThere(*result.block, result.stream, [](void*, void*) { return false; }));
  EXPECT_EQ(result.block->version, version);
  const auto shared = result.rig.newSharedBlock(result.truth);
  result.rig.cache.fetch(*shared, {0, kBytes}, result.stream);
  EXPECT_FALSE(result.rig.cache.changeThere(*shared, result.stream, [](void*, void*) { return true; }));
  EXPECT_TRUE(result.change(2, result.stream));
  EXPECT_EQ(result.rig.read(*result.block), result.truth);
}

TEST(ChangeThere, WhatFindsNoRoomThereGoesHome) {
  for (const std::size_t budget : {0U, 500U}) {
    Result result(budgetAndSeed(budget));
    EXPECT_EQ(result.rig.cache.transferStats(0).bytesToHost, kBytes);
    result.rig.cache.fetch(*result.block, {0, kBytes}, result.stream);
    ASSERT_TRUE(result.change(2, result.stream));
    EXPECT_EQ(result.rig.cache.transferStats(0).bytesToHost, 2 * kBytes);
    EXPECT_EQ(result.rig.cache.stats(0).dirtyBytes, 0U);
    EXPECT_EQ(result.rig.read(*result.block), result.truth);
  }
}

TEST(ChangeThere, WorkThatFailsLeavesWhatItHasMade) {
  Result result(budgetAndSeed(5000));
  const Bytes part = pattern(2, kPart);
  const auto fail = [&](void* data, void* /*owner*/) -> bool {
    result.rig.writeOnDevice(result.stream, static_cast<std::byte*>(data) + kBegin, part);
    throw Error("midway");
  };
  EXPECT_THROW(result.rig.cache.changeThere(*result.block, result.stream, fail), Error);
  result.truth = with(result.truth, part);
  EXPECT_TRUE(result.change(3, result.stream));
  EXPECT_EQ(result.rig.read(*result.block), result.truth);
}

TEST(ChangeThere, EveryCallOfTheLinkMayFail) {
  int failed = 0;
  for (std::uint64_t fault = 1; fault < 40; ++fault) {
    Result result(budgetAndSeed(fault % 2 == 0 ? 5000 : 500));
    result.rig.cache.fetch(*result.block, {0, kBytes}, result.rig.sim.createStream(0));
    result.rig.link.fail(fault);
    bool done = false;
    try {
      done = result.change(2, result.stream);
    } catch (const Error&) {
      ++failed;
    }
    result.rig.link.fail(0);
    EXPECT_EQ(result.rig.read(*result.block), result.truth) << fault;
    EXPECT_EQ(result.block->version, done ? 2U : 1U) << fault;
    EXPECT_TRUE(result.change(3, result.stream) || result.rig.cache.stats(0).slotBytes == 0) << fault;
    EXPECT_EQ(result.rig.read(*result.block), result.truth) << fault;
  }
  EXPECT_GT(failed, 0);
}

} // namespace
} // namespace offload
