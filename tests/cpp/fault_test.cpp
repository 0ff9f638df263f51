// Every call to the link fails once, for each operation: n = 1, 2, ... until the operation passes. It must end in success or an
// exception, lose no memory, and leave everything working. And the device is lost in the middle of each.
#include "fault_rig.h"

namespace offload {
namespace {

using namespace fault_test;

const std::vector<Scenario>& scenarios() {
  static const auto fetch = [](Faulty& on) { on.pin = on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream); };
  static const auto unpinned = [](Faulty& on) { on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream); };
  static const auto store = [](Faulty& on) {
    on.inPieces = on.one->kind != BlockKind::Pinned;
    const DeviceBuffer result = on.rig.newResult(on.stream, on.next(3));
    on.rig.cache.store(*on.one, {0, kBytes}, result.data, on.stream);
  };
  static const auto adopt = [](Faulty& on) {
    on.inPieces = on.one->kind == BlockKind::Shared;
    on.rig.cache.adopt(*on.one, on.rig.newResult(on.stream, on.next(3)), on.stream);
  };
  static const auto share = [](Faulty& on) { on.one = on.rig.newSharedBlock(on.next(1)); };
  static const auto foreignWrite = [](Faulty& on) {
    share(on);
    unpinned(on);
    on.one->shared->bump();
  };
  static const std::vector<Scenario> all{
      {"fetch", nothing, fetch},
      {"fetch for two streams", fetch,
       [](Faulty& on) {
         Pin hit = on.rig.cache.fetch(*on.one, {0, kBytes}, on.other);
         hit.alsoUsedOn(on.stream);
       }},
      {"fetch that evicts", unpinned, [](Faulty& on) { on.rig.cache.fetch(*on.two, {0, kBytes}, on.other); }},
      {"unpin", fetch, [](Faulty& on) { on.pin = Pin(); }},
      {"fetch after a store", store, fetch},
      {"store", nothing, store},
      {"store over a fetch", unpinned, store},
      {"adopt", nothing, adopt},
      {"adopt memory of the link", nothing,
       [](Faulty& on) {
         void* const data = on.rig.sim.allocate(kBytes, on.stream);
         on.rig.writeOnDevice(on.stream, data, on.next(3));
         on.rig.cache.adopt(*on.one, {data, kBytes, on.stream, nullptr}, on.stream);
       }},
      {"adopt over a fetch", unpinned, adopt},
      {"store under a lease", nothing,
       [](Faulty& on) {
         const HostLease lease = on.rig.cache.lease(*on.one, Access::Read);
         store(on);
       }},
      {"read", store, [](Faulty& on) { on.rig.read(*on.one); }},
      {"write", unpinned, [](Faulty& on) { on.rig.write(*on.one, on.next(4)); }},
      {"forget and allocate", unpinned,
       [](Faulty& on) {
         on.one = on.rig.newBlock(on.next(5));
         on.more.push_back(on.rig.newBlock(1 << 16));
         on.rig.arena.trim();
       }},
      {"fetch ahead, and then fetch", nothing,
       [](Faulty& on) {
         const Pin ahead = on.rig.cache.fetchAhead(*on.one, {0, kBytes}, on.stream);
         fetch(on);
       }},
      {"share", nothing, share},
      {"fetch after another process wrote", foreignWrite, fetch},
      {"store into shared memory", share, store},
      {"adopt into shared memory", share, adopt},
      {"drain", adopt, [](Faulty& on) { on.rig.cache.drain(false); }},
      {"empty the cache", adopt, [](Faulty& on) { on.rig.cache.emptyCache(0); }},
      {"shrink the ring", unpinned, [](Faulty& on) { on.rig.cache.setRingBytes(0); }},
  };
  return all;
}

class Fault : public testing::TestWithParam<Memory> {};
std::string nameOf(const testing::TestParamInfo<Memory>& info) {
  if (info.param == Memory::File) return "File";
  return info.param == Memory::Pageable ? "Pageable" : "Pinned";
}
INSTANTIATE_TEST_SUITE_P(Memory, Fault, testing::Values(Memory::Pinned, Memory::Pageable, Memory::File), nameOf);

TEST_P(Fault, EachCallFailsOnce) {
  for (const Scenario& scenario : scenarios()) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      ASSERT_NO_FATAL_FAILURE(failEachCall(scenario, seed, GetParam()));
    }
  }
}

TEST_P(Fault, TheDeviceIsLost) {
  for (const Scenario& scenario : scenarios()) {
    bool failed = true;
    for (std::uint64_t n = 1; failed; ++n) {
      SCOPED_TRACE(std::string(scenario.name) + ", call " + std::to_string(n));
      CoreOptions lost = faultOptions(scenario, n, GetParam());
      lost.sim.detectRaces = false; // nothing can be ordered any more
      Faulty on(lost, GetParam());
      scenario.before(on);
      on.rig.link.fail(n, Failing::FromThenOn);
      try {
        scenario.operation(on);
      } catch (const Error&) {
      }
      failed = on.rig.link.failures() > 0;
      // Everything ends all the same, and what throws says so.
      if (failed) {
        EXPECT_THROW(on.rig.cache.fetch(*on.two, {0, 10}, on.other), Error);
      }
      on.pin = Pin();
      on.one.reset();
      on.two.reset();
      on.rig.cache.emptyCache(0);
      EXPECT_NO_THROW(on.rig.arena.validate());
      // What could not be done then is done when the device is back.
      on.rig.link.fail(0);
      on.rig.cache.emptyCache(0);
      on.more.clear();
      // One token of a stream is asked at a time; one that could not be recorded is recorded then.
      for (int round = 0; round < 10 && on.rig.arena.stats().reserved + on.rig.arena.stats().shared > 0; ++round) {
        on.rig.arena.trim();
        on.rig.sim.drain();
      }
      EXPECT_EQ(on.rig.sim.bytesInUse(0), 0U);
      EXPECT_EQ(on.rig.owned, 0);
      EXPECT_EQ(on.rig.arena.stats().reserved, 0U);
      ASSERT_FALSE(testing::Test::HasFailure());
    }
  }
}

TEST_P(Fault, AFailedFetchHasReadTheHostBytes) {
  // Whichever call fails, a copy that was enqueued before is waited for by the next write.
  for (std::uint64_t n = 1; n < 60; ++n) {
    Faulty on(faultOptions(scenarios().front(), n, GetParam()), GetParam());
    on.rig.link.fail(n);
    try {
      on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream);
    } catch (const Error&) {
    }
    on.rig.link.fail(0);
    EXPECT_NO_THROW(on.rig.write(*on.one, pattern(9, kBytes)));
  }
}

TEST(FaultLink, FailsTheCallThatWasChosen) {
  SimLink sim;
  FaultLink link(sim);
  const Stream stream = link.createStream(0);
  link.fail(2);
  const Event event = link.createEvent(0);
  EXPECT_THROW(link.record(event, stream), Error);
  EXPECT_TRUE(link.query(event)); // it was not recorded
  link.record(event, stream);
  EXPECT_EQ(link.failures(), 1U);
  link.fail(1, Failing::FromThenOn);
  EXPECT_THROW(link.allocate(10, stream), OutOfMemory);
  EXPECT_FALSE(link.registerHost(nullptr, 0));
  EXPECT_THROW(link.synchronize(event), Error);
  EXPECT_EQ(link.failures(), 3U);
  link.fail(0);
  link.synchronize(event);
  link.destroyEvent(event);
}

} // namespace
} // namespace offload
