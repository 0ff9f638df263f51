// Which random programs run.
//   OFFLOAD_FUZZ_SEEDS=n    how many programs, of each kind
//   OFFLOAD_FUZZ_FIRST=n    the first one's seed
#pragma once

#include <cstdint>
#include <cstdlib>

namespace offload::core_test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr std::uint64_t kDefaultSeeds = 500;
#else
inline constexpr std::uint64_t kDefaultSeeds = 10'000;
#endif

struct Seeds {
  std::uint64_t first;
  std::uint64_t end;
};

/// Those that the environment asks for; otherwise so many.
inline Seeds seeds(std::uint64_t otherwise) {
  const auto number = [](const char* name, std::uint64_t unset) {
    const char* const text = std::getenv(name);
    return text == nullptr ? unset : std::strtoull(text, nullptr, 10);
  };
  const std::uint64_t first = number("OFFLOAD_FUZZ_FIRST", 0);
  return {first, first + number("OFFLOAD_FUZZ_SEEDS", otherwise)};
}

} // namespace offload::core_test
