// What the tests of the cache share: every seed, and rings of a size.
#pragma once

#include "core_rig.h"

namespace offload::core_test {

/// Runs `body` on a Rig of every seed, with a compute stream that is not host-driven; nothing may be reported or left.
template <class Body>
void onEverySeed(Body body, CoreOptions options = {}) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    options.sim.seed = seed;
    Rig rig(options);
    ASSERT_NO_THROW(body(rig, rig.sim.createStream(0))) << "seed " << seed;
    for (int device = 0; device < rig.sim.deviceCount(); ++device) {
      rig.cache.emptyCache(device);
      ASSERT_EQ(rig.sim.bytesInUse(device), 0U) << "seed " << seed;
    }
    ASSERT_NO_THROW(rig.sim.drain()) << "seed " << seed;
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

inline CoreOptions ringOf(std::size_t bytes) {
  CoreOptions options;
  options.cache.ringBytes = bytes;
  return options;
}

} // namespace offload::core_test
