// Memory that is not page-locked: copies go through the ring, in order, whole, and without anybody waiting.
#include "core/bounce_ring.h"

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kChunk = 100;

/// Knows which host memory is page-locked, which the copies used, and whether anybody asked for an event.
class WatchingLink : public FaultLink {
 public:
  using FaultLink::FaultLink;

  void copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) override {
    pageableCopies += !isLocked(host);
    hosts.insert(host);
    FaultLink::copyToDevice(device, host, bytes, stream);
  }
  void copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    pageableCopies += !isLocked(host);
    hosts.insert(host);
    FaultLink::copyToHost(host, device, bytes, stream);
  }
  void launchHost(HostTask task, Stream stream) override {
    if (whenLaunched) whenLaunched();
    FaultLink::launchHost(std::move(task), stream);
  }
  bool query(Event event) override {
    ++asked;
    return FaultLink::query(event);
  }
  void synchronize(Event event) override {
    ++asked;
    FaultLink::synchronize(event);
  }
  bool registerHost(void* host, std::size_t bytes) override {
    ++registrations;
    const bool done = FaultLink::registerHost(host, bytes);
    if (done) locked[static_cast<const std::byte*>(host)] = bytes;
    return done;
  }
  void unregisterHost(void* host, std::size_t bytes) noexcept override {
    EXPECT_EQ(locked.at(static_cast<const std::byte*>(host)), bytes);
    locked.erase(static_cast<const std::byte*>(host));
    FaultLink::unregisterHost(host, bytes);
  }
  bool wantsRegistration() const override {
    return wanted;
  }

  bool isLocked(const void* host) const {
    const auto after = locked.upper_bound(static_cast<const std::byte*>(host));
    return after != locked.begin() && host < std::prev(after)->first + std::prev(after)->second;
  }

  bool wanted = true;
  std::function<void()> whenLaunched;
  int pageableCopies = 0;
  std::set<const void*> hosts;
  int asked = 0;
  int registrations = 0;
  std::map<const std::byte*, std::size_t> locked;
};

struct Bounce {
  explicit Bounce(SimOptions options = {}, bool wanted = true) : sim(options), link(sim), events(link) {
    link.wanted = wanted;
    transfer.emplace(link, events, 0, TransferOptions{.chunkBytes = kChunk});
  }
  ~Bounce() {
    transfer.reset();
    EXPECT_TRUE(link.locked.empty());
    EXPECT_NO_THROW(sim.drain());
  }
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;

  Token send(void* device, const Bytes& host, std::span<const Token> after = {}) {
    reads = {};
    return transfer->toDevice(device, host.data(), host.size(), HostMemory::Pageable, after, reads);
  }
  Token receive(Bytes& host, const void* device, std::span<const Token> after = {}) {
    uses = {};
    return transfer->toHost(host.data(), device, host.size(), HostMemory::Pageable, after, uses);
  }
  /// Device memory that holds `value` after the token.
  std::pair<void*, Token> newOnDevice(const Bytes& value) {
    void* const data = sim.allocate(value.size(), stream);
    sim.launch(stream, [=] { std::memcpy(data, value.data(), value.size()); }, {}, {{data, value.size()}});
    return {data, events.record(stream)};
  }
  Bytes onDevice(const void* device, std::size_t bytes, const Token& after) {
    Bytes seen(bytes);
    after.orderBefore(stream);
    sim.launch(stream, [&] { std::memcpy(seen.data(), device, bytes); }, {{device, bytes}}, {});
    events.record(stream).wait();
    return seen;
  }
  void* allocate(std::size_t bytes) {
    return sim.allocate(bytes, transfer->deviceBound());
  }

  SimLink sim;
  WatchingLink link;
  EventPool events;
  std::optional<Transfer> transfer;
  Stream stream = sim.createStream(0);
  TokenSet reads;
  TokenSet uses;
};

void onEverySeed(const std::function<void(Bounce&)>& body) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Bounce on({.seed = seed});
    ASSERT_NO_THROW(body(on)) << "seed " << seed;
    ASSERT_NO_THROW(on.sim.drain()) << "seed " << seed;
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

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

// ---- where there is no page-locked memory

TEST(Bounce, WithoutARingTheLinkGetsTheMemoryItself) {
  for (const bool wanted : {false, true}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      Bounce on({.seed = seed, .registrationLimit = 4 * kChunk - 1}, wanted);
      const Bytes host = pattern(1, 3 * kChunk);
      Bytes home(host.size());
      void* const device = on.allocate(host.size());
      const Token there = on.send(device, host);
      EXPECT_FALSE(on.reads.empty());
      on.receive(home, device, {&there, 1}).wait();
      on.sim.hostAccess(home.data(), home.size(), Access::Write);
      EXPECT_EQ(home, host);
      on.send(device, host);
      EXPECT_EQ(on.link.pageableCopies, 3);
      EXPECT_EQ(on.link.registrations, wanted ? 2 : 0); // once a direction
      on.transfer->drain();
    }
  }
}

TEST(Bounce, PageLockedMemoryGoesWithoutTheRing) {
  Bounce on;
  const Bytes host = pattern(1, 3 * kChunk);
  TokenSet reads;
  on.transfer->toDevice(on.allocate(host.size()), host.data(), host.size(), HostMemory::Pinned, {}, reads);
  EXPECT_EQ(on.link.registrations, 0);
  on.transfer->drain();
}

TEST(BounceRing, HasMoreChunksWhereAllAreTaken) {
  SimLink sim({.wantsRegistration = true, .registrationLimit = 2 * BounceRing::kChunks * kChunk});
  WatchingLink link(sim);
  BounceRing ring(link, kChunk);
  EXPECT_EQ(link.registrations, 0);
  std::vector<BounceRing::Taken> taken;
  std::set<std::byte*> all;
  for (std::size_t i = 0; i < 2 * BounceRing::kChunks; ++i) {
    taken.push_back(ring.take());
    ASSERT_NE(taken.back(), nullptr);
    EXPECT_TRUE(link.isLocked(taken.back()->data + kChunk - 1));
    all.insert(taken.back()->data);
  }
  EXPECT_EQ(all.size(), taken.size());
  EXPECT_EQ(ring.take(), nullptr); // refused
  EXPECT_EQ(link.registrations, 3);
  EXPECT_EQ(ring.take(), nullptr);
  EXPECT_EQ(link.registrations, 3);
  std::byte* const first = taken[3]->data;
  taken[3].reset();
  taken.clear();
  EXPECT_EQ(ring.take()->data, first); // the one given back first
}

TEST(Bounce, WhereOthersHaveTheChunksACopyGoesOnWithItsOwn) {
  // Copies that begin within each other's calls, as those of several threads do: four have a chunk each, the fifth has none.
  for (const bool home : {false, true}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      const Bytes value = pattern(seed, 5 * kChunk);
      std::vector<Bytes> host(5, home ? Bytes(value.size()) : value);
      std::vector<void*> device;
      Bounce on({.seed = seed, .registrationLimit = BounceRing::kChunks * kChunk});
      std::vector<Token> done(5);
      for (std::size_t i = 0; i < 5; ++i) {
        device.push_back(home ? on.newOnDevice(value).first : on.allocate(value.size()));
      }
      const Token written = on.events.record(on.stream);
      std::size_t copies = 0;
      const std::function<void()> begin = [&] {
        if (copies == 5) return;
        const std::size_t i = copies++;
        done[i] = home ? on.receive(host[i], device[i], {&written, 1}) : on.send(device[i], host[i]);
      };
      on.link.whenLaunched = begin;
      ASSERT_NO_THROW(begin());
      EXPECT_EQ(on.link.pageableCopies, 1);
      for (std::size_t i = 0; i < 5; ++i) {
        if (home) {
          done[i].wait();
          on.sim.hostAccess(host[i].data(), host[i].size(), Access::Read);
        }
        EXPECT_EQ(home ? host[i] : on.onDevice(device[i], value.size(), done[i]), value) << i;
      }
    }
  }
}

// ---- failures

/// Whichever call fails, what was begun is known, and what comes after goes well.
void failEachCall(const std::function<void(Bounce&, Bytes&, void*)>& copy) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    bool failed = true;
    for (std::uint64_t n = 1; failed; ++n) {
      SCOPED_TRACE("call " + std::to_string(n) + ", seed " + std::to_string(seed));
      Bounce on({.seed = seed});
      Bytes host = pattern(1, 6 * kChunk);
      const auto [device, written] = on.newOnDevice(pattern(2, host.size()));
      written.orderBefore(on.transfer->deviceBound());
      written.orderBefore(on.transfer->hostBound());
      on.link.fail(n);
      try {
        copy(on, host, device);
      } catch (const Error&) {
      }
      failed = on.link.failures() > 0;
      on.link.fail(0);
      on.reads.wait();
      on.uses.wait();
      ASSERT_NO_THROW(on.sim.hostAccess(host.data(), host.size(), Access::Write));
      host = pattern(3, host.size());
      Bytes home(host.size());
      const Token there = on.send(device, host);
      ASSERT_NO_THROW(on.receive(home, device, {&there, 1}).wait());
      ASSERT_EQ(home, host);
      ASSERT_LT(n, 100U);
    }
  }
}

TEST(Bounce, ACopyToTheDeviceThatFailsMidwayIsAccountedFor) {
  failEachCall([](Bounce& on, Bytes& host, void* device) { on.send(device, host); });
}

TEST(Bounce, ACopyHomeThatFailsMidwayIsAccountedFor) {
  failEachCall([](Bounce& on, Bytes& host, void* device) { on.receive(host, device); });
  // Nor is the source used any more.
  for (std::uint64_t n = 1; n < 60; ++n) {
    Bounce on({.seed = n});
    Bytes host(6 * kChunk);
    const auto [device, written] = on.newOnDevice(pattern(2, host.size()));
    on.link.fail(n);
    try {
      on.receive(host, device, {&written, 1});
    } catch (const Error&) {
    }
    on.link.fail(0);
    for (const Token& token : on.uses.all()) token.orderBefore(on.stream);
    on.sim.free(device, on.stream);
    ASSERT_NO_THROW(on.sim.drain());
  }
}

TEST(Bounce, ItEndsAfterACopyThatFailedMidway) {
  for (std::uint64_t n = 1; n < 80; ++n) {
    const Bytes sent = pattern(1, 6 * kChunk);
    Bytes home(sent.size());
    Bounce on({.seed = n});
    void* const there = on.allocate(sent.size());
    const auto [device, written] = on.newOnDevice(sent);
    on.link.fail(n);
    EXPECT_THROW(
        {
          on.receive(home, device, {&written, 1});
          on.send(there, sent);
          throw Error("none failed");
        },
        Error);
    on.link.fail(0);
    on.transfer.reset();
    EXPECT_NO_THROW(on.sim.drain()) << n;
  }
}

// ---- threads

TEST(Bounce, ThreadsCopyAtOnce) {
  // With a limit, there are fewer chunks than threads: the rest of a copy then goes without.
  for (const std::size_t limit : {SIZE_MAX, 2 * BounceRing::kChunks * kChunk}) {
    SimLink sim({.registrationLimit = limit});
    FaultLink link(sim);
    EventPool events(link);
    Transfer transfer(link, events, 0, {.chunkBytes = kChunk});
    const auto work = [&](std::uint64_t thread) {
      const std::size_t bytes = 9 * kChunk + thread;
      const Stream stream = sim.createStream(0);
      void* const device = sim.allocate(bytes, stream);
      Token last = events.record(stream);
      for (std::uint64_t repeat = 0; repeat < 20; ++repeat) {
        const Bytes sent = pattern(thread * 1000 + repeat, bytes);
        Bytes home(bytes);
        TokenSet reads;
        TokenSet uses;
        last.orderBefore(transfer.deviceBound());
        const Token there = transfer.toDevice(device, sent.data(), bytes, HostMemory::Pageable, {}, reads);
        last = transfer.toHost(home.data(), device, bytes, HostMemory::Pageable, {&there, 1}, uses);
        last.wait();
        ASSERT_EQ(home, sent);
      }
    };
    std::vector<std::thread> threads;
    for (std::uint64_t thread = 0; thread < 8; ++thread) threads.emplace_back(work, thread);
    for (auto& thread : threads) thread.join();
    EXPECT_TRUE(sim.reports().empty());
  }
}

} // namespace
} // namespace offload
