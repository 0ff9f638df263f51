// What the fault sweeps share: scenarios in which one call to the link fails, n = 1, 2, ... until the scenario passes, and what must
// hold after each.
#pragma once

#include <algorithm>
#include <functional>
#include <string>

#include "core_rig.h"
#include "test_file.h"

namespace offload::fault_test {

using namespace core_test;

inline constexpr std::size_t kBytes = 1000;
inline constexpr std::size_t kPlenty = 1 << 20;

enum class Memory { Pinned, Pageable, File };

/// Two Blocks, of which `one` is the scenario's.
struct Faulty {
  explicit Faulty(const CoreOptions& options, Memory memory = Memory::Pinned) : rig(options) {
    one = newBlock(pattern(1, kBytes), memory);
    two = newBlock(pattern(2, kBytes), memory);
  }
  Rig::BlockPtr newBlock(const Bytes& value, Memory memory) {
    if (memory != Memory::File) return rig.newBlock(value);
    return rig.fileBlock(std::make_shared<File>(TestFile(value).path()), 0, value.size());
  }

  Bytes next(std::uint64_t tag) {
    values.push_back(pattern(tag, kBytes));
    return values.back();
  }

  void becomesGradient() {
    one->purpose = Purpose::Gradient;
    one->derivedFrom = two->data;
  }

  Rig rig;
  Stream stream = rig.sim.createStream(0);
  Stream other = rig.sim.createStream(rig.sim.deviceCount() - 1);
  Rig::BlockPtr one;
  Rig::BlockPtr two;
  std::vector<Bytes> values{pattern(1, kBytes)}; // that `one` has been given
  bool inPieces = false; // a write that fails midway may leave pieces of two values
  HostLease lease;
  Pin pin;
  std::vector<Rig::BlockPtr> more;
};

struct Scenario {
  const char* name;
  std::function<void(Faulty&)> before; // nothing fails yet
  std::function<void(Faulty&)> operation;
  std::function<void(CoreOptions&)> adjust = [](CoreOptions&) {};
};

inline void nothing(Faulty& /*on*/) {}

inline void withBudget(CoreOptions& options) {
  options.cache.budgetBytes = kPlenty;
}

inline CoreOptions faultOptions(const Scenario& scenario, std::uint64_t seed, Memory memory) {
  CoreOptions options;
  options.sim.seed = seed;
  options.sim.tellsTime = seed % 4 == 2;
  options.arena.pinnedLimit = memory == Memory::Pageable ? 0 : SIZE_MAX;
  options.cache.chunkBytes = kBytes / 4;
  options.cache.ringBytes = 1024;
  options.cache.poison = seed % 2 == 1;
  scenario.adjust(options);
  return options;
}

/// One use of everything, and then nothing may be left.
inline void expectWholeAfter(Faulty& on) {
  on.rig.cache.validate(*on.one);
  on.rig.cache.validate(*on.two);
  on.rig.arena.validate();
  on.lease = {};
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
  for (int device = 0; device < on.rig.sim.deviceCount(); ++device) {
    on.rig.cache.emptyCache(device);
    EXPECT_EQ(on.rig.cache.stats(device).slotBytes, 0U);
    EXPECT_EQ(on.rig.cache.stats(device).pinnedBytes, 0U);
    EXPECT_EQ(on.rig.sim.bytesInUse(device), 0U);
  }
  EXPECT_EQ(on.rig.owned, 0);
  EXPECT_EQ(on.rig.arena.stats().allocated, 0U);
  on.rig.sim.drain();
  on.rig.arena.trim();
  EXPECT_EQ(on.rig.arena.stats().reserved, 0U);
  EXPECT_EQ(on.rig.arena.stats().shared, 0U);
}

/// What `one` holds: what it was given last, or after an exception what it was given before.
inline void expectValue(Faulty& on, bool threw) {
  const Bytes found = on.rig.read(*on.one);
  if (!threw) {
    EXPECT_EQ(found, on.values.back());
  } else if (!on.inPieces) {
    EXPECT_NE(std::find(on.values.begin(), on.values.end(), found), on.values.end()) << "a value that it was never given";
  }
  EXPECT_EQ(on.rig.read(*on.two), pattern(2, kBytes));
}

inline void failEachCall(const Scenario& scenario, std::uint64_t seed, Memory memory) {
  bool failed = true;
  for (std::uint64_t n = 1; failed; ++n) {
    SCOPED_TRACE(std::string(scenario.name) + ", call " + std::to_string(n) + ", seed " + std::to_string(seed));
    Faulty on(faultOptions(scenario, seed, memory), memory);
    scenario.before(on);
    on.values.erase(on.values.begin(), on.values.end() - 1);
    on.rig.link.fail(n);
    bool threw = false;
    try {
      scenario.operation(on);
    } catch (const Error&) {
      threw = true;
      EXPECT_EQ(on.rig.link.failures(), 1U);
    }
    failed = on.rig.link.failures() > 0;
    on.rig.link.fail(0);
    ASSERT_NO_THROW(expectValue(on, threw));
    ASSERT_NO_THROW(expectWholeAfter(on));
    ASSERT_FALSE(testing::Test::HasFailure());
    ASSERT_LT(n, 200U);
  }
}

} // namespace offload::fault_test
