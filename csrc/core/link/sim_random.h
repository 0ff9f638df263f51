// The simulation's random numbers: splitmix64, because a link that lives for fifty calls can't spend microseconds on seeding.
#pragma once

#include <cstdint>

namespace offload {

class SimRandom {
 public:
  explicit SimRandom(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  /// A number in [0, n).
  std::uint64_t below(std::uint64_t n) {
    return next() % n;
  }
  bool oneIn(std::uint64_t n) {
    return below(n) == 0;
  }

 private:
  std::uint64_t state_;
};

} // namespace offload
