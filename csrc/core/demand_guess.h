// What somebody is likely to ask for who does not say how much he wants.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace offload {

/// Goes by the last requests. Guarded by whoever owns it.
class DemandGuess {
 public:
  static constexpr std::size_t kLeast = std::size_t{512} << 20;
  static constexpr std::size_t kRemembered = 64;

  void asked(std::size_t bytes) {
    last_[next_++ % kRemembered] = bytes;
  }

  /// What is to be given where it is short: twice the largest of them.
  std::size_t most() const {
    return within(SIZE_MAX);
  }
  /// What is to be kept free where nobody is short: twice the largest of them, or as much as it, of those that `possible` bytes could
  /// serve. A request that has taken most of what there is is no reason to keep the rest of it free for another.
  std::size_t within(std::size_t possible) const {
    std::size_t guess = kLeast;
    for (const std::size_t bytes : last_) {
      for (const std::size_t next : {bytes, 2 * bytes}) {
        if (next <= possible) guess = std::max(guess, next);
      }
    }
    return guess;
  }

 private:
  std::array<std::size_t, kRemembered> last_{};
  std::size_t next_ = 0;
};

} // namespace offload
