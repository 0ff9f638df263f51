// The fault sweep over what changes Blocks by other ways than a store: work for later, in the cache, in place, and reads in place.
#include "fault_rig.h"

namespace offload {
namespace {

using namespace fault_test;

void whenWanted(CoreOptions& options) {
  options.cache.hostJobs = HostJobs::When::Wanted;
}

void fetchBoth(Faulty& on) {
  on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream);
  on.rig.cache.fetch(*on.two, {0, kBytes}, on.stream);
}

void adopt(Faulty& on) {
  on.one->born = Born::Device;
  on.rig.cache.adopt(*on.one, on.rig.newResult(on.stream, on.next(3)), on.stream);
}

// Whose failure the next call tells that waits for it.
void writeLater(Faulty& on) {
  on.rig.cache.runLater({{on.one.get(), Access::Write}}, [&on, value = on.next(4)] {
    on.rig.sim.hostAccess(on.one->data, kBytes, Access::Write);
    std::copy(value.begin(), value.end(), static_cast<unsigned char*>(on.one->data));
  });
}

void updateThere(Faulty& on) {
  const Bytes value = on.next(5);
  const std::vector<Residency::Claim> claims{{on.one.get(), Access::Write}, {on.two.get(), Access::Read}};
  const bool done = on.rig.cache.updateThere(claims, on.stream, [&](const std::vector<void*>& at) {
    on.rig.sim.launch(
        on.stream, [at, value] { std::copy(value.begin(), value.end(), static_cast<unsigned char*>(at[0])); },
        {{at[1], kBytes}}, {{at[0], kBytes}});
  });
  if (!done) {
    on.values.pop_back();
  }
}

void changeThere(Faulty& on) {
  const Bytes value = on.next(6);
  const bool done = on.rig.cache.changeThere(*on.one, on.stream, [&](void* data, void* /*owner*/) {
    on.rig.writeOnDevice(on.stream, data, value);
    return true;
  });
  if (!done) {
    on.values.pop_back();
  }
}

// Whoever has failed to say that fetched bytes come home has changed them all the same.
void changeFetched(Faulty& on) {
  on.inPieces = on.one->kind != BlockKind::Pinned;
  on.pin = on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream);
  on.rig.cache.beforeChange(on.pin, on.stream);
  on.rig.writeOnDevice(on.stream, on.pin.data(), on.next(7));
  on.rig.cache.bringHome(on.pin, on.stream);
}

void readInPlace(Faulty& on) {
  const DeviceLease lease = on.rig.cache.leaseToDevice(*on.one, {0, kBytes}, on.stream, kBytes);
  if (!lease) {
    return;
  }
  on.rig.sim.launch(on.stream, [] {}, {{lease.data(), kBytes}}, {});
}

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all{
      {"work for later, and a fetch", nothing,
       [](Faulty& on) {
         writeLater(on);
         on.pin = on.rig.cache.fetch(*on.one, {0, kBytes}, on.stream);
       },
       whenWanted},
      {"work for later, and a read", fetchBoth,
       [](Faulty& on) {
         writeLater(on);
         on.rig.read(*on.one);
       },
       whenWanted},
      {"work for later, and a drain", fetchBoth,
       [](Faulty& on) {
         writeLater(on);
         on.rig.cache.drain(false);
       },
       whenWanted},
      {"an update in the cache", fetchBoth, updateThere, withBudget},
      {"an update in the cache, and a read", fetchBoth,
       [](Faulty& on) {
         updateThere(on);
         on.rig.read(*on.one);
       },
       withBudget},
      {"an update in the cache over a result", adopt, updateThere, withBudget},
      {"a change in the cache", adopt, changeThere, withBudget},
      {"a change in the cache, and a read", adopt,
       [](Faulty& on) {
         changeThere(on);
         on.rig.read(*on.one);
       },
       withBudget},
      {"a change of what was fetched", nothing, changeFetched},
      {"a change of a result that was fetched", adopt, changeFetched, withBudget},
      {"a read in place", nothing, readInPlace},
      {"a write after a read in place", readInPlace, [](Faulty& on) { on.rig.write(*on.one, on.next(8)); }},
      {"a drain after a read in place", readInPlace, [](Faulty& on) { on.rig.cache.drain(false); }},
  };
  return all;
}

class FaultOfAChange : public testing::TestWithParam<Memory> {};
INSTANTIATE_TEST_SUITE_P(
    Memory, FaultOfAChange, testing::Values(Memory::Pinned, Memory::Pageable, Memory::File), [](const auto& info) {
      if (info.param == Memory::File) return "File";
      return info.param == Memory::Pageable ? "Pageable" : "Pinned";
    });

TEST_P(FaultOfAChange, EachCallFailsOnce) {
  for (const Scenario& scenario : scenarios()) {
    for (std::uint64_t seed = 0; seed < 10; ++seed) {
      ASSERT_NO_FATAL_FAILURE(failEachCall(scenario, seed, GetParam()));
    }
  }
}

} // namespace
} // namespace offload
