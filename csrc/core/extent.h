// A range of bytes within a Block.
#pragma once

#include <cstddef>

namespace offload {

/// Device copies keep a host address's remainder by this, or cuBLAS picks other kernels and bits change.
inline constexpr std::size_t kAlignment = 256;

struct Extent {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t bytes() const noexcept {
    return end - begin;
  }
  bool contains(const Extent& other) const noexcept {
    return begin <= other.begin && other.end <= end;
  }
  bool overlaps(const Extent& other) const noexcept {
    return begin < other.end && other.begin < end;
  }
  /// The smallest extent around this one whose beginning is aligned.
  Extent aligned() const noexcept {
    return {begin / kAlignment * kAlignment, end};
  }
  friend bool operator==(const Extent&, const Extent&) = default;
};

struct ExtentHash {
  std::size_t operator()(const Extent& extent) const noexcept {
    return extent.begin * 0x9E3779B97F4A7C15U ^ extent.end;
  }
};

} // namespace offload
