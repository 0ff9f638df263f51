// Random programs from seeds: see fuzz_program.h.
//   OFFLOAD_FUZZ_SEEDS=n    how many programs, of each kind
//   OFFLOAD_FUZZ_FIRST=n    the first one's seed
#include <cstdlib>

#include "fuzz_program.h"

namespace offload {
namespace {

using namespace core_test;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t kDefaultSeeds = 500;
#else
constexpr std::uint64_t kDefaultSeeds = 10'000;
#endif
/// Programs that once found a mistake.
struct Regression {
  std::uint64_t seed;
  bool faulty;
};
constexpr Regression kRegressionSeeds[] = {
    {379, false}, // accesses to simulated device memory were remembered when the heap had handed it out as host memory
    {0, true}, // memory that could not be adopted was lost
    {2, true}, // a store that failed left its copy reading what the caller then freed
    {4, true}, // an unpin that failed kept its Slot for good
    {6, true}, // a copy whose event was refused had no token
    {7, true}, // a Slot that was never listed outlived its Block, and pointed to it
    {28, true}, // the host allocator lost what was pending when a token threw
};

std::uint64_t environmentNumber(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

bool runs(std::uint64_t seed, bool faulty) {
  const char* const kind = faulty ? "AFailingLinkLosesNothing" : "BytesAndOrder";
  try {
    Program(seed, faulty).run();
    return true;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "seed " << seed << ": " << error.what() << "\n  OFFLOAD_FUZZ_FIRST=" << seed
                  << " OFFLOAD_FUZZ_SEEDS=1 build/core/offload_core_tests --gtest_filter=Fuzz." << kind;
    return false;
  }
}

void runSeeds(bool faulty) {
  const std::uint64_t first = environmentNumber("OFFLOAD_FUZZ_FIRST", 0);
  const std::uint64_t count = environmentNumber("OFFLOAD_FUZZ_SEEDS", kDefaultSeeds);
  int failed = 0;
  for (std::uint64_t seed = first; seed < first + count && failed < 5; ++seed) {
    failed += !runs(seed, faulty);
  }
}

TEST(Fuzz, Regressions) {
  for (const auto& [seed, faulty] : kRegressionSeeds) {
    runs(seed, faulty);
  }
}

TEST(Fuzz, BytesAndOrder) {
  runSeeds(false);
}

TEST(Fuzz, AFailingLinkLosesNothing) {
  runSeeds(true);
}

} // namespace
} // namespace offload
