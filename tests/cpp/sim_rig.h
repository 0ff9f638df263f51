// What the tests of the simulated link share.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/link/sim_link.h"

namespace offload::sim_test {

inline constexpr std::uint64_t seeds = 200;
inline constexpr std::size_t size = 64;
using Bytes = std::array<unsigned char, size>;

inline Bytes filledWith(unsigned char value) {
  Bytes bytes;
  bytes.fill(value);
  return bytes;
}

/// A link with two streams, an event, and `size` bytes of host memory and of device memory, these allocated on the first stream.
struct Rig {
  explicit Rig(std::uint64_t seed) : link({.seed = seed, .deviceBytes = 4096}) {}
  ~Rig() {
    link.destroyEvent(event);
  }

  Bytes host{}; // outlives the link, which may still copy when it ends
  SimLink link;
  Stream one = link.createStream(0);
  Stream two = link.createStream(0);
  Event event = link.createEvent(0);
  void* device = link.allocate(size, one);
};

/// Runs `body` on a Rig of every seed. Each must end in a report that has all of `words`.
template <class Body>
void expectReport(Body body, const std::vector<std::string>& words) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Rig rig(seed);
    try {
      body(rig);
      rig.link.drain();
      FAIL() << "no report with seed " << seed;
    } catch (const Error& error) {
      for (const std::string& word : words) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
      }
    }
    EXPECT_FALSE(rig.link.reports().empty());
  }
}

/// Runs `body` on a Rig of every seed. None may be reported.
template <class Body>
void expectNoReport(Body body) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Rig rig(seed);
    ASSERT_NO_THROW(body(rig)) << "seed " << seed;
    ASSERT_NO_THROW(rig.link.drain()) << "seed " << seed;
    EXPECT_TRUE(rig.link.reports().empty());
  }
}

} // namespace offload::sim_test
