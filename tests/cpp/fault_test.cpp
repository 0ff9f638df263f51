// Every call to the link fails once, for each operation: n = 1, 2, ... until the operation passes. It must end in success or an
// exception, lose no memory, and leave everything working. And the device is lost in the middle of each.
#include <functional>

#include "core_rig.h"
#include "test_file.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 1000;

enum class Memory { Pinned, Pageable, File };

CoreOptions options(std::uint64_t seed, Memory memory) {
  CoreOptions options;
  options.sim.seed = seed;
  options.arena.pinnedLimit = memory == Memory::Pageable ? 0 : SIZE_MAX;
  options.cache.chunkBytes = kBytes / 4;
  options.cache.ringBytes = 1024;
  options.cache.poison = seed % 2 == 1;
  return options;
}

struct Faulty {
  Faulty(const CoreOptions& options, Memory memory) : rig(options) {
    one = newBlock(pattern(1, kBytes), memory);
    two = newBlock(pattern(2, kBytes), memory);
  }
  Rig::BlockPtr newBlock(const Bytes& value, Memory memory) {
    if (memory != Memory::File) return rig.newBlock(value);
    return rig.fileBlock(std::make_shared<File>(TestFile(value).path()), 0, value.size());
  }

  Rig rig;
  Stream stream = rig.sim.createStream(0);
  Stream other = rig.sim.createStream(0);
  Rig::BlockPtr one;
  Rig::BlockPtr two;
  Pin pin;
  std::vector<Rig::BlockPtr> more;
};

struct Scenario {
  const char* name;
  std::function<void(Faulty&)> before; // nothing fails yet
  std::function<void(Faulty&)> operation;
};

const std::vector<Scenario>& scenarios() {
  static const auto nothing = [](Faulty&) {};
  static const auto fetch = [](Faulty& on) { on.pin = on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream); };
  static const auto unpinned = [](Faulty& on) { on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream); };
  static const auto store = [](Faulty& on) {
    const DeviceBuffer result = on.rig.newResult(on.stream, pattern(3, kBytes));
    on.rig.cache.store(*on.one, {0, kBytes}, result.data, on.stream);
  };
  static const auto adopt = [](Faulty& on) {
    on.rig.cache.adopt(*on.one, on.rig.newResult(on.stream, pattern(3, kBytes)), on.stream);
  };
  static const auto share = [](Faulty& on) { on.one = on.rig.newSharedBlock(pattern(1, kBytes)); };
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
         on.rig.writeOnDevice(on.stream, data, pattern(3, kBytes));
         on.rig.cache.adopt(*on.one, {data, kBytes, on.stream, nullptr}, on.stream);
       }},
      {"adopt over a fetch", unpinned, adopt},
      {"store under a lease", nothing,
       [](Faulty& on) {
         const HostLease lease = on.rig.cache.lease(*on.one, Access::Read);
         store(on);
       }},
      {"read", store, [](Faulty& on) { on.rig.read(*on.one); }},
      {"write", unpinned, [](Faulty& on) { on.rig.write(*on.one, pattern(4, kBytes)); }},
      {"forget and allocate", unpinned,
       [](Faulty& on) {
         on.one = on.rig.newBlock(pattern(5, kBytes));
         on.more.push_back(on.rig.newBlock(1 << 16));
         on.rig.arena.trim();
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

/// One use of everything, and then nothing may be left.
void expectWholeAfter(Faulty& on) {
  on.rig.cache.validate(*on.one);
  on.rig.cache.validate(*on.two);
  on.rig.arena.validate();
  on.pin = on.rig.cache.fetch(*on.two, {0, kBytes}, on.other);
  const auto seen = on.rig.readOnDevice(on.other, on.pin.data(), kBytes);
  on.rig.write(*on.one, pattern(6, kBytes));
  on.rig.cache.adopt(*on.two, on.rig.newResult(on.stream, pattern(7, kBytes)), on.stream);
  EXPECT_EQ(on.rig.read(*on.one), pattern(6, kBytes));
  EXPECT_EQ(on.rig.read(*on.two), pattern(7, kBytes));
  on.rig.sim.drain();
  EXPECT_EQ(*seen, pattern(2, kBytes));
  on.pin = Pin();
  on.one.reset();
  on.two.reset();
  on.more.clear();
  on.rig.cache.emptyCache(0);
  EXPECT_EQ(on.rig.cache.stats(0).slotBytes, 0U);
  EXPECT_EQ(on.rig.cache.stats(0).pinnedBytes, 0U);
  EXPECT_EQ(on.rig.sim.bytesInUse(0), 0U);
  EXPECT_EQ(on.rig.owned, 0);
  EXPECT_EQ(on.rig.arena.stats().allocated, 0U);
  on.rig.sim.drain();
  on.rig.arena.trim();
  EXPECT_EQ(on.rig.arena.stats().reserved, 0U);
  EXPECT_EQ(on.rig.arena.stats().shared, 0U);
}

void failEachCall(const Scenario& scenario, std::uint64_t seed, Memory memory) {
  bool failed = true;
  for (std::uint64_t n = 1; failed; ++n) {
    SCOPED_TRACE(std::string(scenario.name) + ", call " + std::to_string(n) + ", seed " + std::to_string(seed));
    Faulty on(options(seed, memory), memory);
    scenario.before(on);
    on.rig.link.fail(n);
    try {
      scenario.operation(on);
    } catch (const Error&) {
      EXPECT_EQ(on.rig.link.failures(), 1U);
    }
    failed = on.rig.link.failures() > 0;
    on.rig.link.fail(0);
    ASSERT_NO_THROW(expectWholeAfter(on));
    ASSERT_FALSE(testing::Test::HasFailure());
    ASSERT_LT(n, 100U);
  }
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
      CoreOptions lost = options(n, GetParam());
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
      EXPECT_EQ(on.rig.sim.bytesInUse(0), 0U);
      EXPECT_EQ(on.rig.owned, 0);
      on.rig.sim.drain();
      ASSERT_FALSE(testing::Test::HasFailure());
    }
  }
}

TEST_P(Fault, AFailedFetchHasReadTheHostBytes) {
  // Whichever call fails, a copy that was enqueued before is waited for by the next write.
  for (std::uint64_t n = 1; n < 60; ++n) {
    Faulty on(options(n, GetParam()), GetParam());
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
