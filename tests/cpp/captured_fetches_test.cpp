// Note [Captured fetches]: graphs whose copies from the host are captured, and replayed while the host writes.
#include <atomic>
#include <thread>

#include "graph_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 1000;
constexpr std::size_t kPiece = kBytes + kAlignment; // of Staging

CoreOptions graphOptions(std::uint64_t seed = 0, std::size_t ringBytes = 1 << 20) {
  CoreOptions options;
  options.sim.seed = seed;
  options.cache.ringBytes = ringBytes;
  options.cache.poison = true;
  return options;
}

TEST(CapturedFetches, AReplayReadsWhatTheHostHasThen) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    GraphRig rig(graphOptions(seed));
    Blocks blocks(rig, 4, kBytes);
    Reader reader(rig);
    reader.capture(blocks.all);
    for (int round = 0; round < 3; ++round) {
      for (int k = 0; k < 4; ++k) rig.write(*blocks.all[k], pattern(100 * round + k, kBytes)); // waits for the replay before
      reader.replay(reader.stream);
      if (round % 2 == 0) rig.sim.drain();
      if (round % 2 == 0) reader.expect({100 * round, 100 * round + 1, 100 * round + 2, 100 * round + 3});
    }
    rig.sim.drain();
  }
}

TEST(CapturedFetches, WhatHasNoRoomUsesMemoryAgain) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    GraphRig rig(graphOptions(seed, 2 * kPiece));
    Blocks blocks(rig, 8, kBytes);
    const std::size_t before = rig.sim.bytesInUse(0);
    Reader reader(rig);
    reader.capture(blocks.all);
    EXPECT_LE(rig.sim.bytesInUse(0) - before, 2 * std::size_t{1536});
    for (int round = 0; round < 2; ++round) {
      reader.replayAndExpect({0, 1, 2, 3, 4, 5, 6, 7});
    }
  }
}

TEST(CapturedFetches, SmallTensorsDoNotTakeLargeMemory) {
  GraphRig rig(graphOptions(0, 1 << 14));
  Blocks small(rig, 4, kBytes);
  const auto large = rig.newBlock(pattern(9, 1 << 14));
  Reader reader(rig);
  reader.capture({large.get(), small.all[0], small.all[1], large.get(), small.all[2], small.all[3], large.get()});
  EXPECT_EQ(reader.fetches->staging().bytes(), (std::size_t{1} << 14) + kAlignment + kPiece);
  reader.replayAndExpect({9, 0, 1, 9, 2, 3, 9});
}

TEST(CapturedFetches, LateCopies) {
  for (const std::size_t budget : {std::size_t{0}, 4 * kPiece}) { // all pass, or two are held
    CoreOptions options = graphOptions(0, kPiece);
    options.cache.budgetBytes = budget;
    options.cache.copyDelay = std::chrono::microseconds(100);
    GraphRig rig(options);
    Blocks blocks(rig, 3, kBytes);
    Reader reader(rig);
    reader.capture(blocks.all);
    EXPECT_EQ(reader.fetches->held().size(), budget / 2 / kPiece);
    for (int round = 0; round < 2; ++round) reader.replayAndExpect({0, 1, 2});
  }
}

TEST(CapturedFetches, OneDeviceEach) {
  CoreOptions options = graphOptions();
  options.sim.devices = 2;
  GraphRig rig(options);
  const auto block = rig.newBlock(pattern(1, kBytes));
  const Stream stream = rig.sim.createStream(0);
  const Stream there = rig.sim.createStream(1);
  rig.link.begin(stream);
  const auto fetches = rig.cache.beginCapture(stream, [](Block&) { return nullptr; });
  const Event fork = rig.link.createEvent(0);
  rig.link.record(fork, stream);
  rig.link.wait(there, fork);
  EXPECT_THROW(rig.cache.fetch(*block, {0, kBytes}, there), Error);
  rig.link.end();
  rig.link.destroyEvent(fork);
}

TEST(CapturedFetches, WhatAPinHoldsIsNotUsedAgain) {
  GraphRig rig(graphOptions(0, kPiece));
  Blocks blocks(rig, 4, kBytes);
  Reader reader(rig);
  reader.begin();
  Pin held = rig.cache.fetch(*blocks.all[0], {0, kBytes}, reader.stream);
  void* const address = held.data();
  for (int k = 1; k < 4; ++k) reader.read(*blocks.all[k]);
  reader.readFrom(address, kBytes);
  reader.end();
  held = {}; // what was captured meanwhile may read it in any replay
  Reader other(rig);
  other.capture({blocks.all[3]});
  reader.replay(reader.stream);
  other.replay(other.stream);
  const auto later = rig.readOnDevice(other.stream, address, kBytes);
  rig.sim.drain();
  EXPECT_EQ(*reader.seen.back(), pattern(0, kBytes));
  EXPECT_EQ(*later, pattern(0, kBytes));
}

TEST(CapturedFetches, GraphsShareMemoryAndFollowEachOther) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    GraphRig rig(graphOptions(seed));
    Blocks blocks(rig, 4, kBytes);
    Reader first(rig);
    Reader second(rig);
    first.capture({blocks.all[0], blocks.all[1]});
    const std::size_t before = rig.sim.bytesInUse(0);
    second.capture({blocks.all[2], blocks.all[3]});
    EXPECT_EQ(rig.sim.bytesInUse(0), before);
    for (int round = 0; round < 3; ++round) {
      first.replay(first.stream);
      second.replay(second.stream);
    }
    rig.sim.drain();
    first.expect({0, 1});
    second.expect({2, 3});
  }
}

TEST(CapturedFetches, TheNextGraphTakesTheSmallestThatIsLargeEnough) {
  GraphRig rig(graphOptions());
  const auto large = rig.newBlock(pattern(1, 2000));
  const auto small = rig.newBlock(pattern(2, 1500));
  const auto smaller = rig.newBlock(pattern(3, 1400));
  Reader first(rig);
  first.capture({large.get(), small.get()});
  const Staging& staging = first.fetches->staging();
  const std::size_t before = staging.bytes();
  EXPECT_EQ(before, 3500 + 2 * kAlignment);
  Reader second(rig);
  second.capture({smaller.get(), large.get()});
  EXPECT_EQ(staging.bytes(), before);
  second.replayAndExpect({3, 1});
  Reader third(rig);
  third.capture({small.get(), small.get()}); // the second in the large one
  EXPECT_EQ(staging.bytes(), before);
  third.replayAndExpect({2, 2});
}

TEST(CapturedFetches, WhatIsNewerOnTheDeviceGoesHomeFirst) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreOptions options = graphOptions(seed);
    options.cache.budgetBytes = 1 << 20;
    GraphRig rig(options);
    const auto block = rig.newBlock(pattern(1, kBytes));
    Reader reader(rig);
    reader.capture({block.get()});
    const Stream other = rig.sim.createStream(0);
    rig.cache.adopt(*block, rig.newResult(other, pattern(2, kBytes)), other);
    reader.replay(reader.stream);
    rig.cache.adopt(*block, rig.newResult(other, pattern(3, kBytes)), other);
    EXPECT_EQ(rig.read(*block), pattern(3, kBytes)); // goes home behind the replay
    rig.sim.drain();
    reader.expect({2});
  }
}

// Each comes behind all that the others have told of.
TEST(CapturedFetches, OneThreadLaunchesAtATime) {
  GraphRig rig(graphOptions());
  Blocks blocks(rig, 2, kBytes);
  Reader first(rig);
  Reader second(rig);
  first.capture({blocks.all[0]});
  second.capture({blocks.all[1]});
  std::atomic<bool> launching = false;
  const auto launch = [&](Reader& reader) {
    for (int round = 0; round < 200; ++round) {
      rig.cache.beginReplay(*reader.fetches, reader.stream);
      EXPECT_FALSE(launching.exchange(true));
      std::this_thread::yield();
      launching = false;
      rig.cache.endReplay(*reader.fetches, reader.stream);
    }
  };
  std::thread other([&] { launch(second); });
  launch(first);
  other.join();
  rig.sim.drain();
}

TEST(CapturedFetches, WhatTheHostIsAboutToDoIsDoneFirst) {
  for (const auto when : {HostJobs::When::Soon, HostJobs::When::Wanted}) {
    CoreOptions options = graphOptions();
    options.cache.hostJobs = when;
    GraphRig rig(options);
    const auto block = rig.newBlock(pattern(1, kBytes));
    Reader reader(rig);
    reader.capture({block.get()});
    for (int round = 0; round < 20; ++round) {
      rig.cache.runLater({{block.get(), Access::Write}}, [&, round] {
        const Bytes value = pattern(100 + round, kBytes);
        std::memcpy(block->data, value.data(), kBytes);
      });
      reader.replayAndExpect({100 + round});
    }
  }
}

TEST(CapturedFetches, AGraphKeepsItsBlocks) {
  GraphRig rig(graphOptions());
  Blocks blocks(rig, 2, kBytes);
  Reader reader(rig);
  reader.capture({blocks.all[0], blocks.all[1], blocks.all[0]});
  EXPECT_EQ(reader.fetches->blocks().size(), 2U);
  EXPECT_EQ(reader.kept[blocks.all[0]], 1);
  reader.fetches = nullptr;
  EXPECT_EQ(reader.kept[blocks.all[0]], 0);
  EXPECT_EQ(reader.kept[blocks.all[1]], 0);
  rig.sim.drain();
  EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
}

TEST(CapturedFetches, APinThatOutlivesItsGraphKeepsItsMemory) {
  GraphRig rig(graphOptions());
  const auto block = rig.newBlock(pattern(1, kBytes));
  Reader reader(rig);
  reader.begin();
  std::optional<Pin> pin = rig.cache.fetch(*block, {0, kBytes}, reader.stream);
  reader.end();
  reader.replay(reader.stream);
  reader.fetches = nullptr;
  const auto seen = rig.readOnDevice(reader.stream, pin->data(), kBytes);
  pin.reset();
  EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
  rig.sim.drain();
  EXPECT_EQ(*seen, pattern(1, kBytes));
}

TEST(CapturedFetches, SideStreamsOfACapture) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    GraphRig rig(graphOptions(seed, kPiece));
    Blocks blocks(rig, 3, kBytes);
    Reader reader(rig);
    const Stream side = rig.sim.createStream(0);
    reader.begin();
    const Event fork = rig.link.createEvent(0);
    const Event join = rig.link.createEvent(0);
    auto onSide = std::make_shared<Bytes>(kBytes);
    {
      Pin pin = rig.cache.fetch(*blocks.all[0], {0, kBytes}, reader.stream);
      rig.link.record(fork, reader.stream);
      rig.link.wait(side, fork);
      pin.alsoUsedOn(side);
      rig.link.launch(
          side, [onSide, data = pin.data()] { std::memcpy(onSide->data(), data, kBytes); }, {{pin.data(), kBytes}}, {});
    }
    reader.read(*blocks.all[1]); // into the same memory
    rig.link.record(join, side);
    rig.link.wait(reader.stream, join);
    reader.read(*blocks.all[2]);
    reader.end();
    reader.replay(reader.stream);
    rig.sim.drain();
    EXPECT_EQ(*onSide, pattern(0, kBytes));
    reader.expect({1, 2});
    rig.link.destroyEvent(fork);
    rig.link.destroyEvent(join);
  }
}

TEST(CapturedFetches, MemoryThatAnotherStreamReadsIsNotUsedAgain) {
  GraphRig rig(graphOptions(0, kPiece));
  Blocks blocks(rig, 2, kBytes);
  Reader reader(rig);
  reader.begin();
  rig.cache.fetch(*blocks.all[0], {0, kBytes}, reader.stream)
      .alsoUsedOn(rig.sim.createStream(0)); // nothing orders that with a replay
  reader.read(*blocks.all[1]);
  reader.end();
  EXPECT_EQ(reader.fetches->staging().bytes(), 2 * kPiece);
  reader.replayAndExpect({1});
}

TEST(CapturedFetches, PartsOfABlockKeepTheirAlignment) {
  GraphRig rig(graphOptions());
  const auto block = rig.newBlock(pattern(1, kBytes));
  Reader reader(rig);
  reader.begin();
  {
    const Pin part = rig.cache.fetch(*block, {100, 300}, reader.stream);
    const auto remainder = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kAlignment; };
    EXPECT_EQ(remainder(part.data()), remainder(static_cast<std::byte*>(block->data) + 100));
    EXPECT_FALSE(rig.cache.fetch(*block, {100, 100}, reader.stream));
    EXPECT_THROW(rig.cache.fetch(*block, {0, kBytes + 1}, reader.stream), Error);
    EXPECT_FALSE(rig.cache.fetchAhead(*block, {0, kBytes}, reader.stream));
    reader.readFrom(part.data(), 200);
  }
  reader.end();
  reader.replay(reader.stream);
  rig.sim.drain();
  const Bytes all = pattern(1, kBytes);
  EXPECT_EQ(*reader.seen[0], Bytes(all.begin() + 100, all.begin() + 300));
}

TEST(CapturedFetches, WhatCanNotBeCapturedIsRefused) {
  CoreOptions options = graphOptions();
  GraphRig rig(options);
  const auto block = rig.newBlock(pattern(1, kBytes));
  const auto pageable = rig.newBlock(kBytes, Born::Host, false);
  const Stream stream = rig.sim.createStream(0);
  EXPECT_THROW(rig.cache.beginCapture(stream, [](Block&) { return nullptr; }), Error);
  rig.link.begin(stream);
  EXPECT_THROW(rig.cache.fetch(*block, {0, kBytes}, stream), Error) << "nobody has told of it";
  auto fetches = rig.cache.beginCapture(stream, [](Block&) { return nullptr; });
  EXPECT_THROW(rig.cache.fetch(*pageable, {0, kBytes}, stream), Error);
  EXPECT_THROW(rig.cache.store(*block, {0, kBytes}, nullptr, stream), Error);
  EXPECT_THROW(rig.cache.beginReplay(*fetches, stream), Error);
  rig.cache.fetch(*block, {0, kBytes}, stream);
  fetches = nullptr;
  EXPECT_THROW(rig.cache.fetch(*block, {0, kBytes}, stream), Error) << "nobody keeps it any more";
  rig.link.end();
  rig.sim.drain();
}

TEST(CapturedFetches, NoMemoryForTheCopiesIsTold) {
  CoreOptions options = graphOptions(0, 1 << 14);
  options.sim.deviceBytes = 1 << 14;
  GraphRig rig(options);
  Blocks blocks(rig, 20, kBytes);
  Reader reader(rig);
  std::vector<Pin> pins;
  reader.begin();
  EXPECT_THROW(
      for (Block* block
           : blocks.all) pins.push_back(rig.cache.fetch(*block, {0, kBytes}, reader.stream)),
      OutOfMemory);
  pins.clear();
  reader.end();
  reader.fetches = nullptr;
  EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
  const Pin pin = rig.cache.fetch(*blocks.all[0], {0, kBytes}, reader.stream);
  const auto seen = rig.readOnDevice(reader.stream, pin.data(), kBytes);
  rig.sim.drain();
  EXPECT_EQ(*seen, pattern(0, kBytes));
}

TEST(CapturedFetches, WhatHasNoRoomOnTheDeviceUsesMemoryAgain) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    CoreOptions options = graphOptions(seed);
    options.sim.deviceBytes = 4096; // the ring has room for more
    GraphRig rig(options);
    Blocks blocks(rig, 8, kBytes);
    Reader reader(rig);
    ASSERT_NO_THROW(reader.capture(blocks.all));
    EXPECT_EQ(reader.fetches->staging().bytes(), 3 * kPiece);
    for (int round = 0; round < 2; ++round) reader.replayAndExpect({0, 1, 2, 3, 4, 5, 6, 7});
  }
}

TEST(CapturedFetches, ReplaysOnStreamsThatComeAndGoLeaveNothing) {
  GraphRig rig(graphOptions());
  const auto block = rig.newBlock(pattern(1, kBytes));
  Reader reader(rig);
  reader.capture({block.get()});
  for (int k = 0; k < 20; ++k) {
    const Stream stream = rig.sim.createStream(0);
    reader.replay(stream);
    rig.sim.drain();
    reader.expect({1});
    EXPECT_LE(reader.fetches->staging().uses().size(), 1U);
    rig.sim.destroyStream(stream);
  }
}

TEST(CapturedFetches, ReplaysOnStreamsThatComeAndGoLeaveFewTokens) {
  GraphRig rig(graphOptions());
  const auto block = rig.newBlock(pattern(1, kBytes));
  Reader reader(rig);
  reader.capture({block.get()});
  for (std::uint64_t k = 1; k <= 500; ++k) {
    Stream stream = rig.sim.createStream(0);
    stream.id = k;
    reader.replay(stream);
    if (k % 50 == 0) rig.sim.drain();
    ASSERT_LE(block->readers.all().size(), 128U);
  }
  rig.sim.drain();
}

// As when a backward pass is captured for itself: what the forward's fetches are used by then is known when that capture has ended.
TEST(CapturedFetches, AStreamMayGoWhenItsCapturesHaveEnded) {
  for (const bool captured : {true, false}) {
    CoreOptions options = graphOptions();
    options.cache.budgetBytes = captured ? 0 : 1 << 20;
    GraphRig rig(options);
    Blocks blocks(rig, 2, kBytes);
    Reader first(rig);
    Reader second(rig);
    first.stream = second.stream = rig.sim.createStream(0);
    first.stream.id = second.stream.id = 1; // a program has made it
    Pin pin;
    if (!captured) pin = rig.cache.fetch(*blocks.all[0], {0, kBytes}, first.stream);
    first.begin();
    if (captured) pin = rig.cache.fetch(*blocks.all[0], {0, kBytes}, first.stream);
    first.read(*blocks.all[1]);
    first.end();
    second.begin();
    second.read(*blocks.all[1]);
    pin = {};
    second.end();
    rig.sim.destroyStream(first.stream);
    const Stream other = rig.sim.createStream(0);
    for (int round = 0; round < 2; ++round) {
      rig.write(*blocks.all[1], pattern(10 + round, kBytes));
      ASSERT_NO_THROW(first.replay(other));
      ASSERT_NO_THROW(second.replay(other));
      rig.sim.drain();
      first.expect({10 + round});
      second.expect({10 + round});
    }
    EXPECT_EQ(rig.cache.stats(0).pinnedBytes, 0U);
  }
}

TEST(CapturedFetches, AnyCallMayFail) {
  std::uint64_t failures = 1;
  for (std::uint64_t n = 1; failures > 0; ++n) {
    ASSERT_LT(n, 1000U);
    SCOPED_TRACE("call " + std::to_string(n));
    GraphRig rig(graphOptions(n, 2 * kPiece));
    Blocks blocks(rig, 4, kBytes);
    Reader reader(rig);
    rig.link.fail(n);
    std::exception_ptr failure;
    try {
      reader.begin();
      for (Block* block : blocks.all) reader.read(*block);
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    reader.end();
    if (!failure) {
      try {
        reader.replay(reader.stream);
      } catch (const std::exception&) {
        reader.replay(reader.stream);
      }
      rig.sim.drain();
      reader.expect({0, 1, 2, 3});
    }
    failures = rig.link.failures();
    rig.link.fail(0);
    rig.write(*blocks.all[0], pattern(9, kBytes));
    const Pin pin = rig.cache.fetch(*blocks.all[0], {0, kBytes}, reader.stream);
    const auto seen = rig.readOnDevice(reader.stream, pin.data(), kBytes);
    rig.sim.drain();
    EXPECT_EQ(*seen, pattern(9, kBytes));
  }
}

TEST(CapturedFetches, AfterTheEndNothingTouchesTheDevice) {
  GraphRig rig(graphOptions());
  const auto block = rig.newBlock(pattern(1, kBytes));
  Reader reader(rig);
  reader.capture({block.get()});
  const std::size_t used = rig.sim.bytesInUse(0);
  rig.cache.drain(true);
  reader.fetches = nullptr;
  EXPECT_EQ(rig.sim.bytesInUse(0), used);
  rig.lost = true;
}

} // namespace
} // namespace offload
