// Copies of pageable memory where chunks run out, the system refuses them, calls fail, and threads meet.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "arena_rig.h"
#include "bounce_rig.h"

namespace offload {
namespace {

using namespace bounce_test;

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
  EXPECT_EQ(ring.bytes(), 0U);
  std::vector<BounceRing::Taken> taken;
  std::set<std::byte*> all;
  for (std::size_t i = 0; i < 2 * BounceRing::kChunks; ++i) {
    taken.push_back(ring.take());
    ASSERT_NE(taken.back(), nullptr);
    EXPECT_TRUE(link.isLocked(taken.back()->data + kChunk - 1));
    all.insert(taken.back()->data);
    EXPECT_EQ(ring.bytes(), (i / BounceRing::kChunks + 1) * BounceRing::kChunks * kChunk);
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
  EXPECT_EQ(ring.bytes(), 2 * BounceRing::kChunks * kChunk); // kept
}

TEST(BounceRing, IsNotInAForkedChild) {
  SimLink sim({.wantsRegistration = true});
  BounceRing ring(sim, kChunk);
  const auto taken = ring.take();
  ASSERT_NE(taken, nullptr);
  auto* const page = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(taken->data) / wholePages(1) * wholePages(1));
  EXPECT_NE(core_test::residentPages(page, 1), -1);
  const pid_t child = fork();
  if (child == 0) {
    _exit(core_test::residentPages(page, 1) == -1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Bounce, TheStatisticsTellTheMemoryOfAllRings) {
  Bounce on;
  EXPECT_EQ(on.transfer->stats().ringBytes, 0U);
  const Bytes host = pattern(1, 3 * kChunk);
  Bytes home(host.size());
  void* const device = on.allocate(host.size());
  const Token there = on.send(device, host);
  EXPECT_EQ(on.transfer->stats().ringBytes, BounceRing::kChunks * kChunk);
  on.receive(home, device, {&there, 1}).wait();
  EXPECT_EQ(on.transfer->stats().ringBytes, 2 * BounceRing::kChunks * kChunk);
}

TEST(BounceRing, ReturnsWhatNobodyHasAChunkOf) {
  SimLink sim({.wantsRegistration = true, .registrationLimit = 2 * BounceRing::kChunks * kChunk});
  WatchingLink link(sim);
  BounceRing ring(link, kChunk);
  std::vector<BounceRing::Taken> taken;
  for (std::size_t i = 0; i < 2 * BounceRing::kChunks; ++i) taken.push_back(ring.take());
  EXPECT_EQ(ring.take(), nullptr); // refused
  taken.resize(1);
  ring.trim();
  EXPECT_EQ(ring.bytes(), BounceRing::kChunks * kChunk) << "one chunk is in use";
  EXPECT_EQ(link.locked.size(), 1U);
  EXPECT_TRUE(link.isLocked(taken[0]->data));
  taken.clear();
  ring.trim();
  EXPECT_EQ(ring.bytes(), 0U);
  EXPECT_TRUE(link.locked.empty());
  EXPECT_NE(ring.take(), nullptr) << "what was refused before is no more";
  EXPECT_EQ(ring.bytes(), BounceRing::kChunks * kChunk);
}

TEST(Bounce, RingsAreReturnedAfterTheirCopiesAndMadeAgain) {
  onEverySeed([](Bounce& on) {
    const Bytes host = pattern(1, 3 * kChunk);
    Bytes home(host.size());
    for (int round = 0; round < 2; ++round) {
      void* const device = on.allocate(host.size());
      const Token there = on.send(device, host);
      const Token back = on.receive(home, device, {&there, 1});
      EXPECT_EQ(on.transfer->stats().ringBytes, 2 * BounceRing::kChunks * kChunk);
      on.transfer->trimRings();
      EXPECT_EQ(on.transfer->stats().ringBytes, 0U);
      EXPECT_TRUE(on.link.locked.empty());
      back.wait();
      on.sim.hostAccess(home.data(), home.size(), Access::Read);
      EXPECT_EQ(home, host);
      home.assign(home.size(), 0);
    }
  });
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
