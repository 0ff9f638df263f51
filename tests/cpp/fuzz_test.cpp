// Random programs from seeds: see fuzz_program.h.
#include "fuzz_program.h"
#include "fuzz_seeds.h"

namespace offload {
namespace {

using namespace core_test;

/// Programs that once found a mistake.
struct Regression {
  std::uint64_t seed;
  Kind kind;
};
constexpr Regression kRegressionSeeds[] = {
    {379, Kind::Any}, // accesses to simulated device memory were remembered when the heap had handed it out as host memory
    {0, Kind::Failing}, // memory that could not be adopted was lost
    {2, Kind::Failing}, // a store that failed left its copy reading what the caller then freed
    {4, Kind::Failing}, // an unpin that failed kept its Slot for good
    {6, Kind::Failing}, // a copy whose event was refused had no token
    {7, Kind::Failing}, // a Slot that was never listed outlived its Block, and pointed to it
    {447, Kind::Shared}, // a write to shared memory that failed gave its source back before the producer was through with it
    {28, Kind::Failing}, // the host allocator lost what was pending when a token threw
};

const char* nameOf(Kind kind) {
  switch (kind) {
    case Kind::Any:
      return "BytesAndOrder";
    case Kind::Failing:
      return "AFailingLinkLosesNothing";
    case Kind::Ordered:
      return "OrdersThatRepeat";
    case Kind::Batches:
      return "OrdersThatAreCopiedInBatches";
    case Kind::Saved:
      return "ResultsThatGoHomeAtOnce";
    case Kind::Updates:
      return "UpdatesInTheCache";
    case Kind::Jobs:
      return "HostWorkThatIsDoneLater";
    default:
      return "MemoryOfSeveralProcesses";
  }
}

bool runs(std::uint64_t seed, Kind kind, Done* done = nullptr) {
  try {
    Program program(seed, kind);
    program.run();
    if (done != nullptr) done->add(program.done());
    return true;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "seed " << seed << ": " << error.what() << "\n  OFFLOAD_FUZZ_FIRST=" << seed
                  << " OFFLOAD_FUZZ_SEEDS=1 build/core/offload_core_tests --gtest_filter=Fuzz." << nameOf(kind);
    return false;
  }
}

Done runSeeds(Kind kind, std::uint64_t count = kDefaultSeeds) {
  const auto [first, end] = seeds(count);
  int failed = 0;
  Done done;
  for (std::uint64_t seed = first; seed < end && failed < 5; ++seed) {
    failed += !runs(seed, kind, &done);
  }
  return done;
}

TEST(Fuzz, Regressions) {
  for (const auto& [seed, kind] : kRegressionSeeds) {
    runs(seed, kind);
  }
}

TEST(Fuzz, BytesAndOrder) {
  runSeeds(Kind::Any);
}

TEST(Fuzz, AFailingLinkLosesNothing) {
  runSeeds(Kind::Failing);
}

TEST(Fuzz, OrdersThatRepeat) {
  runSeeds(Kind::Ordered, kDefaultSeeds / 5); // which are longer
}

TEST(Fuzz, OrdersThatAreCopiedInBatches) {
  const std::size_t batches = runSeeds(Kind::Batches, kDefaultSeeds / 10).batches;
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || batches > kDefaultSeeds / 10) << batches;
}

TEST(Fuzz, ResultsThatGoHomeAtOnce) {
  runSeeds(Kind::Saved, kDefaultSeeds / 2);
}

TEST(Fuzz, HostWorkThatIsDoneLater) {
  runSeeds(Kind::Jobs, kDefaultSeeds / 2);
}

TEST(Fuzz, UpdatesInTheCache) {
  const std::size_t updates = runSeeds(Kind::Updates, kDefaultSeeds / 2).updates;
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || updates > kDefaultSeeds) << updates;
}

TEST(Fuzz, MemoryOfSeveralProcesses) {
  const std::size_t writes = runSeeds(Kind::Shared, kDefaultSeeds / 2).writesOfOthers;
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || writes > kDefaultSeeds) << writes;
}

} // namespace
} // namespace offload
