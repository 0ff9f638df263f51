// Random programs from seeds: see fuzz_program.h.
#include "fuzz_kept.h"
#include "fuzz_program.h"
#include "fuzz_seeds.h"

namespace offload {
namespace {

using namespace core_test;

/// Where a kept program has failing calls, as many as a step has of them fail in turn: which one it was is the cache's own affair. The
/// schedules are those of seeds that make the same of a kind.
constexpr std::uint64_t kSchedules = 8;
constexpr std::uint64_t kSameKind = 12;

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

/// A program that fails, until it does.
std::string textOf(std::uint64_t seed, Kind kind) {
  Program program(seed, kind, Choices(seed, true));
  try {
    program.run();
  } catch (const std::exception&) {
    // As was said.
  }
  return program.text();
}

/// Of failing calls each is another one, `later` by so many.
Choices::Steps withCalls(Choices::Steps steps, std::uint64_t later) {
  for (auto& step : steps) {
    if (step.decided.contains("fails")) step.decided["call"] = (step.decided["call"] + later) % kFailingCalls;
  }
  return steps;
}

bool runs(std::uint64_t seed, Kind kind, Done* done = nullptr) {
  try {
    Program program(seed, kind, Choices(seed));
    program.run();
    if (done != nullptr) done->add(program.done());
    return true;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "seed " << seed << ": " << error.what() << "\n  OFFLOAD_FUZZ_FIRST=" << seed
                  << " OFFLOAD_FUZZ_SEEDS=1 build/core/offload_core_tests --gtest_filter=Fuzz." << nameOf(kind)
                  << "\nto be kept in fuzz_kept.h, where it fails as text too:\n"
                  << textOf(seed, kind);
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
  for (const auto& [mistake, kind, seed, program] : kKept) {
    const Choices::Steps steps = Choices::parse(program);
    for (std::uint64_t run = 0; run < kSchedules * kFailingCalls; ++run) {
      const std::uint64_t schedule = seed + run / kFailingCalls * kSameKind;
      const Choices::Steps now = withCalls(steps, run % kFailingCalls);
      try {
        Program(schedule, kind, Choices(now)).run();
      } catch (const std::exception& error) {
        ADD_FAILURE() << mistake << ": " << error.what() << "\n  with the schedule of " << schedule << "\n"
                      << Choices::textOf(now);
        break;
      }
    }
  }
}

TEST(Fuzz, AKeptProgramIsTheOneThatWasDrawn) {
  for (const Kind kind : {Kind::Any, Kind::Ordered, Kind::Batches, Kind::Saved, Kind::Jobs, Kind::Updates, Kind::Shared}) {
    for (std::uint64_t seed = 0; seed < 8; seed += 2) { // of which no link fails
      Program drawn(seed, kind, Choices(seed, true));
      drawn.run();
      Program kept(seed, kind, Choices(Choices::parse(drawn.text()), true));
      kept.run();
      EXPECT_EQ(kept.text(), drawn.text()) << nameOf(kind) << " " << seed;
    }
  }
}

TEST(Fuzz, WhatAKeptProgramDoesNotSayIsNo) {
  Choices choices(Choices::parse("system\nfetch block=7\nend reads=1\n"));
  choices.begin("system");
  EXPECT_FALSE(choices.oneIn("of today", 1));
  ASSERT_TRUE(choices.hasMore(0));
  choices.begin("nothing");
  EXPECT_EQ(choices.act([](SimRandom&) { return "store"; }), "fetch");
  EXPECT_EQ(choices.below("block", 4), 3U); // there were more of them
  EXPECT_EQ(choices.below("of today", 4), 0U);
  EXPECT_EQ(choices.below("block", 0), 0U);
  EXPECT_FALSE(choices.hasMore(60));
  choices.begin("end");
  EXPECT_TRUE(choices.oneIn("reads", 2));
  choices.begin("end");
  EXPECT_FALSE(choices.oneIn("reads", 2));
}

TEST(Fuzz, BytesAndOrder) {
  const Done done = runSeeds(Kind::Any);
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || done.changedInPlace > kDefaultSeeds / 10) << done.changedInPlace;
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || done.takenBack > kDefaultSeeds / 100) << done.takenBack;
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || done.readInPlace > kDefaultSeeds / 10) << done.readInPlace;
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
  const Done done = runSeeds(Kind::Updates, kDefaultSeeds / 2);
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || done.updates > kDefaultSeeds) << done.updates;
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || done.changedInPlace > kDefaultSeeds / 2) << done.changedInPlace;
}

TEST(Fuzz, MemoryOfSeveralProcesses) {
  const std::size_t writes = runSeeds(Kind::Shared, kDefaultSeeds / 2).writesOfOthers;
  EXPECT_TRUE(std::getenv("OFFLOAD_FUZZ_SEEDS") != nullptr || writes > kDefaultSeeds) << writes;
}

} // namespace
} // namespace offload
