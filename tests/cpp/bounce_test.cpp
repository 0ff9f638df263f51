// Memory that is not page-locked: copies go through the ring, in order, whole, and without anybody waiting.
#include "bounce_rig.h"

namespace offload {
namespace {

using namespace bounce_test;

const std::vector<std::size_t> kSizes{1, kChunk - 1, kChunk, kChunk + 1, 4 * kChunk, 11 * kChunk + 7};

TEST(Bounce, BytesReachTheDevice) {
  onEverySeed([](Bounce& on) {
    for (const std::size_t bytes : kSizes) {
      const Bytes host = pattern(bytes, bytes);
      void* const device = on.allocate(bytes);
      EXPECT_EQ(on.onDevice(device, bytes, on.send(device, host)), host);
    }
    EXPECT_EQ(on.link.pageableCopies, 0);
  });
}

TEST(Bounce, BytesComeHome) {
  onEverySeed([](Bounce& on) {
    for (const std::size_t bytes : kSizes) {
      const Bytes value = pattern(bytes, bytes);
      Bytes host(bytes);
      const auto [device, written] = on.newOnDevice(value);
      on.receive(host, device, {&written, 1}).wait();
      on.sim.hostAccess(host.data(), bytes, Access::Read);
      EXPECT_EQ(host, value);
    }
    EXPECT_EQ(on.link.pageableCopies, 0);
  });
}

TEST(Bounce, LargePiecesAreWhole) {
  // More than one thread copies each.
  Bounce on;
  Transfer transfer(on.link, on.events, 0);
  const Bytes sent = pattern(1, 2 * TransferOptions{}.chunkBytes + 5);
  Bytes home(sent.size());
  TokenSet reads;
  TokenSet uses;
  void* const device = on.sim.allocate(sent.size(), transfer.deviceBound());
  const Token there = transfer.toDevice(device, sent.data(), sent.size(), HostMemory::Pageable, {}, reads);
  transfer.toHost(home.data(), device, home.size(), HostMemory::Pageable, {&there, 1}, uses).wait();
  EXPECT_TRUE(home == sent);
}

TEST(Bounce, CopiesOfOtherValuesFollowEachOther) {
  // No token is waited for before the end: the chunks' own order is all there is.
  onEverySeed([](Bounce& on) {
    std::vector<Bytes> sent;
    std::vector<Bytes> home(6, Bytes(3 * kChunk));
    for (std::uint64_t i = 0; i < home.size(); ++i) {
      sent.push_back(pattern(i, 3 * kChunk));
      void* const device = on.allocate(3 * kChunk);
      const Token there = on.send(device, sent[i]);
      on.receive(home[i], device, {&there, 1});
    }
    on.transfer->drain();
    for (const Bytes& bytes : home) on.sim.hostAccess(bytes.data(), bytes.size(), Access::Write);
    EXPECT_EQ(home, sent);
  });
}

TEST(Bounce, NothingRunsAndNobodyWaitsInTheCall) {
  Bounce on({.bias = SimBias::Late});
  const Bytes value = pattern(1, 11 * kChunk);
  Bytes home(value.size());
  void* const there = on.allocate(value.size());
  const auto [result, written] = on.newOnDevice(pattern(2, value.size()));
  const std::uint64_t trace = on.sim.trace();
  on.send(there, value);
  on.receive(home, result, {&written, 1});
  EXPECT_EQ(on.sim.trace(), trace);
  EXPECT_EQ(on.link.asked, 0);
  on.transfer->drain();
  EXPECT_EQ(home, pattern(2, home.size()));
}

TEST(Bounce, TheSourceMayBeWrittenOnceItHasBeenRead) {
  onEverySeed([](Bounce& on) {
    Bytes host = pattern(1, 3 * kChunk);
    void* const device = on.allocate(host.size());
    const Token done = on.send(device, host);
    EXPECT_EQ(on.reads.all().size(), 1U);
    on.reads.wait();
    on.sim.hostAccess(host.data(), host.size(), Access::Write);
    host = pattern(2, host.size());
    EXPECT_EQ(on.onDevice(device, host.size(), done), pattern(1, host.size()));
  });
}

TEST(Bounce, ACopyRunsAfterWhatItIsToldTo) {
  onEverySeed([](Bounce& on) {
    Bytes host(3 * kChunk);
    const auto [device, written] = on.newOnDevice(pattern(1, host.size()));
    void* const there = on.allocate(host.size());
    const Token home = on.receive(host, device, {&written, 1});
    const Token again = on.send(there, host, {&home, 1});
    // And over the bytes that the copy just reads.
    const auto [other, rewritten] = on.newOnDevice(pattern(2, host.size()));
    std::vector<Token> after = on.reads.all();
    after.push_back(home);
    after.push_back(rewritten);
    const Token last = on.receive(host, other, after);
    EXPECT_EQ(on.onDevice(there, host.size(), again), pattern(1, host.size()));
    last.wait();
    EXPECT_EQ(host, pattern(2, host.size()));
  });
}

TEST(Bounce, WhatIsNotOrderedAfterTheCopyIsReported) {
  const std::vector<std::pair<const char*, std::function<void(Bounce&, Bytes&)>>> mistakes{
      {"write before the host task has read",
       [](Bounce& on, Bytes& host) {
         on.send(on.allocate(host.size()), host);
         on.sim.hostAccess(host.data() + 2 * kChunk, 1, Access::Write);
       }},
      {"read before the host task has written",
       [](Bounce& on, Bytes& host) {
         const auto [device, written] = on.newOnDevice(pattern(1, host.size()));
         on.receive(host, device, {&written, 1});
         on.sim.hostAccess(host.data() + 2 * kChunk, 1, Access::Read);
       }},
      {"read when the copy has landed in the ring only",
       [](Bounce& on, Bytes& host) {
         const auto [device, written] = on.newOnDevice(pattern(1, host.size()));
         on.receive(host, device, {&written, 1});
         on.events.record(on.transfer->hostBound()).wait();
         on.sim.hostAccess(host.data() + 2 * kChunk, 1, Access::Read);
       }},
      {"a copy that does not wait for the one before",
       [](Bounce& on, Bytes& host) {
         const auto [device, written] = on.newOnDevice(pattern(1, host.size()));
         on.receive(host, device, {&written, 1});
         on.send(on.allocate(host.size()), host);
       }},
      {"a copy home that does not wait for its producer",
       [](Bounce& on, Bytes& host) {
         const auto [device, written] = on.newOnDevice(pattern(1, host.size()));
         on.receive(host, device);
       }},
  };
  for (const auto& [what, mistake] : mistakes) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      Bytes host(3 * kChunk);
      Bounce on({.seed = seed, .failFast = false});
      mistake(on, host);
      on.transfer->drain();
      ASSERT_FALSE(on.sim.reports().empty()) << what << ", seed " << seed;
    }
  }
}

TEST(Bounce, StatisticsCountEachByteOnce) {
  Bounce on;
  Bytes host = pattern(1, 5 * kChunk + 1);
  void* const device = on.allocate(host.size());
  const Token there = on.send(device, host);
  Bytes home(host.size());
  on.receive(home, device, {&there, 1});
  const TransferStats stats = on.transfer->stats();
  EXPECT_EQ(stats.bytesToDevice, host.size());
  EXPECT_EQ(stats.bytesToHost, host.size());
  EXPECT_EQ(stats.copiesToDevice, 1U);
  EXPECT_EQ(stats.copiesToHost, 1U);
  on.transfer->drain();
}

TEST(Bounce, ALongCopyUsesEveryChunkAndLeavesOneToken) {
  Bounce on;
  Bytes host = pattern(1, 9 * kChunk);
  void* const device = on.allocate(host.size());
  const Token there = on.send(device, host);
  EXPECT_EQ(on.link.hosts.size(), BounceRing::kChunks);
  EXPECT_EQ(on.reads.all().size(), 1U);
  on.receive(host, device, {&there, 1});
  EXPECT_EQ(on.link.hosts.size(), 2 * BounceRing::kChunks);
  EXPECT_EQ(on.uses.all().size(), 1U);
  on.transfer->drain();
}

TEST(Bounce, DrainWaitsForHostTasksToo) {
  onEverySeed([](Bounce& on) {
    Bytes host(3 * kChunk);
    const auto [device, written] = on.newOnDevice(pattern(1, host.size()));
    on.receive(host, device, {&written, 1});
    on.transfer->drain();
    on.sim.hostAccess(host.data(), host.size(), Access::Read);
    EXPECT_EQ(host, pattern(1, host.size()));
  });
}

TEST(Bounce, ItEndsWhileCopiesAreOnTheirWay) {
  const Bytes sent = pattern(1, 7 * kChunk);
  Bytes home(sent.size());
  onEverySeed([&](Bounce& on) {
    const auto [device, written] = on.newOnDevice(pattern(2, home.size()));
    on.receive(home, device, {&written, 1});
    on.send(on.allocate(sent.size()), sent);
    on.transfer.reset();
    EXPECT_TRUE(on.link.locked.empty());
  });
  EXPECT_EQ(home, pattern(2, home.size()));
}

} // namespace
} // namespace offload
