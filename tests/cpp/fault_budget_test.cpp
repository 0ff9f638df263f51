// The fault sweep where there is a budget: hits on what stays, results that are newer than the host's bytes, and what makes room.
#include "fault_rig.h"

namespace offload {
namespace {

using namespace fault_test;

void withLittle(CoreOptions& options) {
  options.cache.budgetBytes = kBytes + kBytes / 2;
}

void onFullDevice(CoreOptions& options) {
  options.cache.budgetBytes = kPlenty;
  options.sim.deviceBytes = 3 * 1024;
}

void onTwoDevices(CoreOptions& options) {
  options.cache.budgetBytes = kPlenty;
  options.sim.devices = 2;
}

void stay(Faulty& on) {
  on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream);
  on.rig.cache.fetch(*on.two, {0, kBytes}, on.stream);
}

void fetch(Faulty& on) {
  on.pin = on.rig.cache.fetch(*on.one, {0, kBytes}, on.other);
}

void adopt(Faulty& on) {
  on.rig.cache.adopt(*on.one, on.rig.newResult(on.stream, on.next(3)), on.stream);
}

void adoptAnother(Faulty& on) {
  on.rig.cache.adopt(*on.one, on.rig.newResult(on.stream, on.next(4)), on.stream);
}

void store(Faulty& on) {
  on.inPieces = on.one->kind != BlockKind::Pinned && on.one->hostVersion == on.one->version;
  const DeviceBuffer result = on.rig.newResult(on.stream, on.next(5));
  on.rig.cache.store(*on.one, {0, kBytes}, result.data, on.stream);
}

void storePart(Faulty& on) {
  on.inPieces = on.one->kind != BlockKind::Pinned;
  const Bytes part = pattern(5, 500);
  Bytes whole = on.values.back();
  std::copy(part.begin(), part.end(), whole.begin() + 256);
  on.values.push_back(whole);
  const DeviceBuffer result = on.rig.newResult(on.stream, part);
  on.rig.cache.store(*on.one, {256, 756}, result.data, on.stream);
}

void write(Faulty& on) {
  on.rig.write(*on.one, on.next(8));
}

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all{
      {"a first hit", stay, fetch, withBudget},
      {"a write over what stays",
       [](Faulty& on) {
         stay(on);
         stay(on);
       },
       write, withBudget},
      {"a budget of nothing",
       [](Faulty& on) {
         stay(on);
         adopt(on);
       },
       [](Faulty& on) { on.rig.cache.setBudget(0); }, withBudget},
      {"an automatic budget", stay, [](Faulty& on) { on.rig.cache.setBudget({}); }, withBudget},
      {"memory is asked back", stay, [](Faulty& on) { on.rig.cache.relieve(0, 0, kPlenty, kPlenty); }, withBudget},
      {"a request was refused", stay, [](Faulty& on) { on.rig.cache.relieveOf(0, kPlenty); }, withBudget},
      {"a full device",
       [](Faulty& on) {
         stay(on);
         on.more.push_back(on.rig.newBlock(pattern(9, kBytes)));
       },
       [](Faulty& on) { on.rig.cache.fetch(*on.more[0], {0, kBytes}, on.stream); }, onFullDevice},
      {"results past the budget",
       [](Faulty& on) {
         adopt(on);
         on.more.push_back(on.rig.newBlock(kBytes));
       },
       [](Faulty& on) { on.rig.cache.adopt(*on.more[0], on.rig.newResult(on.stream, pattern(9, kBytes)), on.stream); },
       withLittle},
      {"a result over a result", adopt, adoptAnother, withBudget},
      {"a result over what stays", stay, adopt, withBudget},
      {"a store over a result", adopt, store, withBudget},
      {"a store into a result", adopt, storePart, withBudget},
      {"a store into what stays", stay, storePart, withBudget},
      {"a fetch of a result", adopt, fetch, withBudget},
      {"a fetch of a part of a result", adopt, [](Faulty& on) { on.pin = on.rig.cache.fetch(*on.one, {256, 512}, on.other); },
       withBudget},
      {"a fetch of another device's result", adopt, fetch, onTwoDevices},
      {"a store from another device over a result", adopt,
       [](Faulty& on) {
         on.inPieces = false;
         const DeviceBuffer result = on.rig.newResult(on.other, on.next(5));
         on.rig.cache.store(*on.one, {0, kBytes}, result.data, on.other);
       },
       onTwoDevices},
      {"a read of a result", adopt, [](Faulty& on) { on.rig.read(*on.one); }, withBudget},
      {"a write over a result", adopt, write, withBudget},
      {"a gradient goes home", [](Faulty& on) { on.becomesGradient(); }, adopt, withBudget},
      {"a gradient's second part goes home",
       [](Faulty& on) {
         on.becomesGradient();
         adopt(on);
         adopt(on);
         on.rig.read(*on.one);
         adopt(on);
       },
       adoptAnother, withBudget},
      {"a result under a lease", [](Faulty& on) { on.lease = on.rig.cache.lease(*on.one, Access::Read); }, adopt, withBudget},
      {"a lease ends", [](Faulty& on) { on.lease = on.rig.cache.lease(*on.one, Access::Write); },
       [](Faulty& on) { on.lease = {}; }, withBudget},
      {"host bytes were changed",
       [](Faulty& on) {
         stay(on);
         on.lease = on.rig.cache.lease(*on.one, Access::Read);
       },
       [](Faulty& on) { on.rig.cache.markWritten(*on.one); }, withBudget},
      {"a result's Block goes", adopt,
       [](Faulty& on) {
         on.one = on.rig.newBlock(on.next(9));
         on.rig.cache.emptyCache(0);
       },
       withBudget},
      {"the cache is emptied of results",
       [](Faulty& on) {
         stay(on);
         adopt(on);
       },
       [](Faulty& on) { on.rig.cache.emptyCache(0); }, withBudget},
      {"a drain", adopt, [](Faulty& on) { on.rig.cache.drain(false); }, withBudget},
      {"the Arena grows", nothing,
       [](Faulty& on) {
         on.more.push_back(on.rig.newBlock(1 << 15));
         on.more.push_back(on.rig.newBlock(1 << 17));
       }},
      {"the Arena is trimmed",
       [](Faulty& on) {
         on.more.push_back(on.rig.newBlock(pattern(9, 1 << 16)));
         on.rig.cache.fetch(*on.more[0], {0, kBytes}, on.stream);
         on.more.clear();
       },
       [](Faulty& on) {
         on.rig.arena.trim();
         on.more.push_back(on.rig.newBlock(1 << 16));
       }},
  };
  return all;
}

class FaultUnderABudget : public testing::TestWithParam<Memory> {};
INSTANTIATE_TEST_SUITE_P(Memory, FaultUnderABudget, testing::Values(Memory::Pinned, Memory::Pageable), [](const auto& info) {
  return info.param == Memory::Pageable ? "Pageable" : "Pinned";
});

TEST_P(FaultUnderABudget, EachCallFailsOnce) {
  for (const Scenario& scenario : scenarios()) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      ASSERT_NO_FATAL_FAILURE(failEachCall(scenario, seed, GetParam()));
    }
  }
}

// Copies are in flight in both directions, something is pinned, and then all of it is destroyed while one call fails. What is left is
// checked by the rig; host memory that the device can't vouch for is kept.
TEST_P(FaultUnderABudget, TheEnd) {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    bool failed = true;
    for (std::uint64_t n = 1; failed; ++n) {
      SCOPED_TRACE("call " + std::to_string(n) + ", seed " + std::to_string(seed));
      const Scenario end{"the end", nothing, nothing, withLittle};
      const CoreOptions options = faultOptions(end, seed, GetParam());
      std::uint64_t failures = 0;
      {
        Faulty on(options);
        on.rig.failuresAtTheEnd = &failures;
        on.rig.mayKeep = true;
        stay(on);
        adopt(on);
        fetch(on);
        on.more.push_back(on.rig.newBlock(pattern(9, 1 << 15)));
        on.rig.cache.fetch(*on.more[0], {0, kBytes}, on.stream);
        on.rig.link.fail(n);
      }
      failed = failures > 0;
      ASSERT_FALSE(testing::Test::HasFailure());
      ASSERT_LT(n, 200U);
    }
  }
}

} // namespace
} // namespace offload
