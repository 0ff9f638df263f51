// What PyTorch's allocator is expected to ask for.
#include "core/demand_guess.h"

#include <gtest/gtest.h>

namespace offload {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

TEST(DemandGuess, BeforeAnyRequestItIsTheLeast) {
  EXPECT_EQ(DemandGuess().within(80 * kGiB), DemandGuess::kLeast);
  EXPECT_EQ(DemandGuess().within(0), DemandGuess::kLeast);
}

TEST(DemandGuess, IsTwiceTheLargestOfLate) {
  DemandGuess guess;
  for (const std::size_t bytes : {1 * kGiB, 3 * kGiB, 2 * kGiB, kGiB / 16}) guess.asked(bytes);
  EXPECT_EQ(guess.within(80 * kGiB), 6 * kGiB);
  for (std::size_t k = 0; k < DemandGuess::kRemembered - 3; ++k) guess.asked(2 * kGiB);
  EXPECT_EQ(guess.within(80 * kGiB), 6 * kGiB);
  guess.asked(2 * kGiB);
  EXPECT_EQ(guess.within(80 * kGiB), 4 * kGiB) << "the largest is forgotten";
}

TEST(DemandGuess, WhatCannotBeHadIsNotKeptFree) {
  DemandGuess guess;
  guess.asked(70 * kGiB);
  guess.asked(1 * kGiB);
  EXPECT_EQ(guess.most(), 140 * kGiB);
  EXPECT_EQ(guess.within(200 * kGiB), 140 * kGiB);
  EXPECT_EQ(guess.within(140 * kGiB), 140 * kGiB);
  EXPECT_EQ(guess.within(79 * kGiB), 70 * kGiB) << "it may ask for as much again, not for twice that";
  EXPECT_EQ(guess.within(10 * kGiB), 2 * kGiB);
  EXPECT_EQ(guess.within(kGiB + kGiB / 2), 1 * kGiB);
  EXPECT_EQ(guess.within(kGiB / 4), DemandGuess::kLeast);
}

} // namespace
} // namespace offload
