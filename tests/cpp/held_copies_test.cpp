// Note [Held copies]: what graphs need not copy at every replay.
#include "graph_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 1000;
constexpr std::size_t kPiece = kBytes + kAlignment;

CoreOptions heldOptions(std::uint64_t seed = 0, std::size_t pieces = 100) {
  CoreOptions options;
  options.sim.seed = seed;
  options.cache.ringBytes = 1 << 20;
  options.cache.budgetBytes = 2 * pieces * kPiece;
  options.cache.poison = true;
  return options;
}

TEST(HeldCopies, AreMadeOnce) {
  GraphRig rig(heldOptions());
  Blocks blocks(rig, 4, kBytes);
  Reader reader(rig);
  reader.capture({blocks.all[0], blocks.all[1], blocks.all[2], blocks.all[3], blocks.all[0]});
  rig.link.copiesSince();
  reader.replay(reader.stream);
  EXPECT_EQ(rig.link.copiesSince(), 4);
  for (int round = 0; round < 3; ++round) reader.replay(reader.stream);
  EXPECT_EQ(rig.link.copiesSince(), 0);
  rig.sim.drain();
  reader.expect({0, 1, 2, 3, 0});
}

TEST(HeldCopies, AreMadeAnewOfWhatHasChanged) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreOptions options = heldOptions(seed);
    options.cache.hostJobs = HostJobs::When::Soon;
    GraphRig rig(options);
    Blocks blocks(rig, 4, kBytes);
    Reader reader(rig);
    reader.capture(blocks.all);
    const Stream other = rig.sim.createStream(0);
    reader.replay(reader.stream);
    rig.sim.drain();
    rig.link.copiesSince();
    for (int round = 1; round < 4; ++round) {
      rig.write(*blocks.all[0], pattern(100 * round, kBytes));
      rig.cache.adopt(*blocks.all[1], rig.newResult(other, pattern(100 * round + 1, kBytes)), other);
      rig.cache.runLater({{blocks.all[2], Access::Write}}, [&, value = pattern(100 * round + 2, kBytes)] {
        std::memcpy(blocks.all[2]->data, value.data(), kBytes);
      });
      reader.replay(reader.stream);
      EXPECT_EQ(rig.link.copiesSince(), 3);
      rig.sim.drain();
      reader.expect({100 * round, 100 * round + 1, 100 * round + 2, 3});
    }
  }
}

TEST(HeldCopies, AReplayThatIsStillUnderWayIsLeftItsBytes) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    GraphRig rig(heldOptions(seed));
    const auto block = rig.newBlock(pattern(1, kBytes));
    Reader first(rig);
    Reader second(rig);
    first.capture({block.get()});
    second.capture({block.get()});
    first.replay(first.stream);
    rig.write(*block, pattern(2, kBytes));
    second.replay(second.stream);
    rig.sim.drain();
    first.expect({1});
    second.expect({2});
  }
}

TEST(HeldCopies, TakeHalfOfTheBudgetAndTheRestIsCopiedEachTime) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    GraphRig rig(heldOptions(seed, 2));
    Blocks blocks(rig, 5, kBytes);
    Reader reader(rig);
    reader.capture(blocks.all);
    EXPECT_EQ(reader.fetches->held().size(), 2U);
    EXPECT_EQ(reader.fetches->staging().bytes(), 3 * kPiece);
    reader.replay(reader.stream);
    rig.link.copiesSince();
    reader.replay(reader.stream);
    EXPECT_EQ(rig.link.copiesSince(), 3);
    rig.sim.drain();
    reader.expect({0, 1, 2, 3, 4});
    // What the graph has the cache has not.
    rig.cache.fetch(*blocks.all[0], {0, kBytes}, reader.stream);
    EXPECT_EQ(rig.cache.budget(0), 2 * kPiece);
    reader.fetches = nullptr;
    rig.cache.setBudget(4 * kPiece);
    EXPECT_EQ(rig.cache.budget(0), 4 * kPiece);
  }
}

TEST(HeldCopies, GraphsShareThem) {
  GraphRig rig(heldOptions(0, 2));
  Blocks blocks(rig, 2, kBytes);
  auto first = std::make_unique<Reader>(rig);
  Reader second(rig);
  first->capture(blocks.all);
  const std::size_t before = rig.sim.bytesInUse(0);
  second.capture(blocks.all);
  EXPECT_EQ(second.fetches->held().size(), 2U);
  EXPECT_EQ(rig.sim.bytesInUse(0), before);
  first->replay(first->stream);
  rig.sim.drain();
  rig.link.copiesSince();
  second.replay(second.stream);
  EXPECT_EQ(rig.link.copiesSince(), 0);
  rig.sim.drain();
  first = nullptr;
  EXPECT_EQ(rig.sim.bytesInUse(0), before);
  second.replayAndExpect({0, 1});
  second.fetches = nullptr;
  EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
}

TEST(HeldCopies, WhatGoesWithItsGraphIsRoomForOthers) {
  GraphRig rig(heldOptions(0, 2));
  Blocks blocks(rig, 4, kBytes);
  for (std::size_t k = 0; k < 3; ++k) {
    Reader first(rig);
    Reader second(rig);
    first.capture({blocks.all[k], blocks.all[k]});
    second.capture({blocks.all[k], blocks.all[k + 1]});
    EXPECT_EQ(first.fetches->held().size(), 1U);
    EXPECT_EQ(second.fetches->held().size(), 2U);
    Reader third(rig);
    third.capture({blocks.all[(k + 2) % 4]});
    EXPECT_EQ(third.fetches->held().size(), 0U);
    second.fetches = nullptr; // the first still has one of its two
    third.capture({blocks.all[(k + 2) % 4], blocks.all[(k + 3) % 4]});
    EXPECT_EQ(third.fetches->held().size(), 1U);
  }
  EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
}

TEST(HeldCopies, PartsOfABlockKeepTheirAlignment) {
  GraphRig rig(heldOptions());
  const auto block = rig.newBlock(pattern(1, kBytes));
  Reader reader(rig);
  reader.begin();
  {
    const Pin part = rig.cache.fetch(*block, {100, 300}, reader.stream);
    const auto remainder = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kAlignment; };
    EXPECT_EQ(remainder(part.data()), remainder(static_cast<std::byte*>(block->data) + 100));
    const Pin all = rig.cache.fetch(*block, {0, kBytes}, reader.stream);
    reader.readFrom(part.data(), 200);
    reader.readFrom(all.data(), kBytes);
  }
  reader.end();
  EXPECT_EQ(reader.fetches->held().size(), 2U);
  for (int round = 0; round < 2; ++round) {
    const Bytes now = pattern(round, kBytes);
    rig.write(*block, now);
    reader.replay(reader.stream);
    rig.sim.drain();
    EXPECT_EQ(*reader.seen[0], Bytes(now.begin() + 100, now.begin() + 300));
    EXPECT_EQ(*reader.seen[1], now);
  }
}

TEST(HeldCopies, WhoStillReadsOneIsWaitedFor) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    GraphRig rig(heldOptions(seed));
    const auto block = rig.newBlock(pattern(1, kBytes));
    Reader reader(rig);
    reader.begin();
    std::optional<Pin> pin = rig.cache.fetch(*block, {0, kBytes}, reader.stream);
    reader.end();
    reader.replay(reader.stream);
    rig.sim.drain();
    const Stream other = rig.sim.createStream(0);
    const auto seen = rig.readOnDevice(other, pin->data(), kBytes);
    pin->alsoUsedOn(other);
    pin.reset();
    rig.write(*block, pattern(2, kBytes));
    reader.replay(reader.stream);
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(1, kBytes));
  }
}

TEST(HeldCopies, WithoutMemoryForThemTheBytesPass) {
  CoreOptions options = heldOptions(0, 100);
  options.cache.ringBytes = kPiece;
  options.sim.deviceBytes = 8192;
  GraphRig rig(options);
  Blocks blocks(rig, 6, kBytes);
  Reader other(rig);
  rig.cache.setBudget(0);
  other.capture({blocks.all[5]}); // there is memory for those that pass before the others take all that is left
  rig.cache.setBudget(options.cache.budgetBytes);
  Reader reader(rig);
  reader.capture(blocks.all);
  EXPECT_EQ(reader.fetches->held().size(), 5U);
  for (int round = 0; round < 2; ++round) {
    reader.replayAndExpect({0, 1, 2, 3, 4, 5});
  }
}

TEST(HeldCopies, AnyCallMayFail) {
  std::uint64_t failures = 1;
  for (std::uint64_t n = 1; failures > 0; ++n) {
    ASSERT_LT(n, 1000U);
    SCOPED_TRACE("call " + std::to_string(n));
    GraphRig rig(heldOptions(n, 2));
    Blocks blocks(rig, 4, kBytes);
    Reader reader(rig);
    rig.link.fail(n);
    bool captured = true;
    try {
      reader.begin();
      for (Block* block : blocks.all) reader.read(*block);
    } catch (const std::exception&) {
      captured = false;
    }
    reader.end();
    for (int round = 0; round < 2 && captured; ++round) {
      const auto inTwoTries = [](const auto& call) {
        try {
          call();
        } catch (const std::exception&) {
          call();
        }
      };
      inTwoTries([&] { rig.write(*blocks.all[0], pattern(static_cast<std::uint64_t>(100 + round), kBytes)); });
      inTwoTries([&] { reader.replay(reader.stream); });
      rig.sim.drain();
      reader.expect({100 + round, 1, 2, 3});
    }
    failures = rig.link.failures();
    rig.link.fail(0);
  }
}

} // namespace
} // namespace offload
