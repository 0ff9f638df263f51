// What comes next, told from what came before.
#include "core/forecast.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <string>

#include "core/block.h"

namespace offload {
namespace {

/// A letter is a Block; a program is a string of fetches.
class ForecastTest : public ::testing::Test {
 protected:
  Block& block(char name) {
    const auto found = blocks_.find(name);
    if (found != blocks_.end()) return *found->second;
    all_.emplace_back(nullptr, std::size_t{4096}, BlockKind::Pinned, Born::Host, 0);
    return *(blocks_[name] = &all_.back());
  }
  void fetch(const std::string& order) {
    for (const char name : order) forecast.follow(block(name), {0, 4096});
  }
  void write(const std::string& names) {
    for (const char name : names) ++block(name).version;
  }
  /// The next `count` fetches: small letters will be written first, `.` is unknown.
  std::string next(std::uint64_t count) {
    std::string out;
    for (std::uint64_t distance = 1; distance <= count; ++distance) {
      const auto expected = forecast.expected(distance);
      char name = '.';
      for (const auto& [known, at] : blocks_) {
        if (at == expected.block) name = known;
      }
      out += expected.writtenFirst ? static_cast<char>(name - 'A' + 'a') : name;
    }
    return out;
  }
  std::string lateNow() {
    std::string out;
    for (const auto& late : forecast.late()) {
      for (const auto& [known, at] : blocks_) {
        if (at == late.block) out += known;
      }
    }
    return out;
  }
  void forget(char name) {
    forecast.forget(block(name));
    blocks_.erase(name);
  }

  Forecast forecast;

 private:
  std::deque<Block> all_;
  std::map<char, Block*> blocks_;
};

TEST_F(ForecastTest, KnowsNothingOfAnOrderThatIsNew) {
  EXPECT_EQ(next(2), "..");
  fetch("ABCDE");
  EXPECT_EQ(next(2), "..");
  EXPECT_EQ(forecast.run(), 0U);
}

TEST_F(ForecastTest, FollowsACycle) {
  fetch("ABCDEA");
  EXPECT_EQ(next(6), "BCDEA.") << "as far as it has seen";
  fetch("BCDEABC");
  EXPECT_EQ(next(7), "DEABC..");
  EXPECT_EQ(forecast.run(), 7U);
}

TEST_F(ForecastTest, TellsTheWayBackFromTheWayForward) {
  fetch("ABCDDCBAABCDDCBAAB");
  EXPECT_EQ(next(7), "CDDCBAA");
  fetch("CDDC");
  EXPECT_EQ(next(4), "BAAB");
  fetch("BA");
  EXPECT_EQ(next(3), "ABC");
}

TEST_F(ForecastTest, ALayerThatIsLeftOutOrComesTwiceCostsOneGuess) {
  fetch("ABCDEFABCDEFAB");
  EXPECT_EQ(next(2), "CD");
  fetch("D");
  EXPECT_FALSE(forecast.foretold());
  EXPECT_EQ(next(2), "EF");
  fetch("EF");
  EXPECT_TRUE(forecast.foretold());
  fetch("ABB");
  EXPECT_FALSE(forecast.foretold());
}

TEST_F(ForecastTest, WhatIsNewDoesNotMoveThePlace) {
  fetch("ABCDEFABCDEFAB");
  EXPECT_EQ(forecast.run(), 7U);
  fetch("X");
  EXPECT_FALSE(forecast.foretold());
  EXPECT_EQ(next(3), "CDE");
  EXPECT_EQ(forecast.run(), 3U);
  fetch("YZ");
  EXPECT_EQ(next(3), "CDE");
  EXPECT_EQ(forecast.run(), 0U);
  fetch("CD");
  EXPECT_EQ(forecast.run(), 2U);
}

TEST_F(ForecastTest, AnExceptionHalvesTheRunAndAnotherOrderEndsIt) {
  fetch("ABCDEFGHIJABCDEFGHIJAB");
  EXPECT_EQ(forecast.run(), 11U);
  fetch("D");
  EXPECT_EQ(forecast.run(), 5U) << "one was left out";
  fetch("C");
  EXPECT_EQ(forecast.run(), 5U) << "and came after it";
  fetch("J");
  EXPECT_EQ(forecast.run(), 0U) << "this is far from there";
  EXPECT_EQ(next(2), "AB");
}

TEST_F(ForecastTest, AfterADetourTheOrderGoesOn) {
  const std::string order = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
  fetch(order + order + "ABCD");
  fetch("ST"); // in place of E
  EXPECT_EQ(forecast.run(), 1U);
  EXPECT_EQ(next(2), "UV");
  fetch("F");
  EXPECT_EQ(forecast.run(), 8U) << "half of what spoke for the order before";
  EXPECT_EQ(next(3), "GHI");
  fetch("GHIJ");
  fetch("STUVWXYZ"); // goes on to the end
  fetch("ABCDEFGHI");
  EXPECT_EQ(forecast.run(), 16U);
  fetch("Y");
  fetch("P"); // is neither where the order was left nor what comes after Y
  EXPECT_EQ(forecast.run(), 0U);
  EXPECT_EQ(next(2), "QR");
}

TEST_F(ForecastTest, NeighboursMayChangePlaces) {
  fetch("ABCDEFGHIJABCDEFGHIJABC");
  EXPECT_EQ(lateNow(), "");
  fetch("G");
  EXPECT_FALSE(forecast.foretold());
  EXPECT_FALSE(forecast.stands());
  EXPECT_EQ(lateNow(), "DEF");
  EXPECT_EQ(next(3), "HIJ");
  const auto run = forecast.run();
  fetch("E");
  EXPECT_TRUE(forecast.foretold()) << "it was only late";
  EXPECT_FALSE(forecast.stands()) << "what comes next comes one fetch later";
  EXPECT_EQ(forecast.run(), run);
  EXPECT_EQ(lateNow(), "DF");
  EXPECT_EQ(next(3), "HIJ");
  fetch("H");
  EXPECT_TRUE(forecast.foretold() && forecast.stands());
  EXPECT_EQ(lateNow(), "DF");
  forget('F');
  EXPECT_EQ(lateNow(), "D");
  fetch("IJ");
  EXPECT_EQ(lateNow(), "") << "as many fetches again are enough";
  fetch("D");
  EXPECT_FALSE(forecast.foretold());
}

TEST_F(ForecastTest, NeighboursThatChangePlacesOnTheWayForwardAreNotThoseOfTheWayBack) {
  fetch("ABCDEFFEDCBAABCDEFFEDCBAABC");
  fetch("E");
  EXPECT_EQ(lateNow(), "D");
  EXPECT_EQ(next(4), "FFED");
  fetch("D");
  EXPECT_EQ(next(4), "FFED");
}

TEST_F(ForecastTest, ALongDetourIsAnotherOrder) {
  const std::string order = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
  fetch(order + order + "ABC");
  fetch("IJKLMNOPQRSTUVWXYZ");
  fetch("D");
  EXPECT_EQ(forecast.run(), 0U);
}

TEST_F(ForecastTest, WhatHasBeenBeforeIsBelievedAtOnce) {
  fetch("ABCDEABXDEABCDEABXDEABCDEAB");
  EXPECT_EQ(next(1), "X");
  fetch("C");
  EXPECT_FALSE(forecast.foretold());
  EXPECT_EQ(next(2), "DE");
  EXPECT_EQ(forecast.run(), 4U) << "the past in common";
}

TEST_F(ForecastTest, LearnsANewOrder) {
  fetch("ABCDABCDAB");
  fetch("DCBADCBAD");
  EXPECT_EQ(next(4), "CBAD");
}

TEST_F(ForecastTest, ExtentsOfOneBlockAreSeveral) {
  Block& table = block('T');
  for (int step = 0; step < 2; ++step) {
    for (const std::size_t row : {0U, 2U, 1U}) forecast.follow(table, {row * 512, row * 512 + 512});
  }
  EXPECT_EQ(forecast.run(), 2U);
  EXPECT_EQ(forecast.expected(1).extent, (Extent{0, 512}));
  EXPECT_EQ(forecast.expected(2).extent, (Extent{1024, 1536}));
}

TEST_F(ForecastTest, WhatTheHostWritesEveryTimeIsNotThereBeforeItHas) {
  fetch("ABC");
  for (int step = 0; step < 2; ++step) {
    write("AC");
    fetch("ABC");
  }
  EXPECT_EQ(next(3), "aBc");
  write("A");
  EXPECT_EQ(next(3), "ABc");
  write("C");
  EXPECT_EQ(next(3), "ABC");
  fetch("A");
  EXPECT_EQ(next(3), "BCa");
  fetch("BC");
  fetch("ABC");
  EXPECT_EQ(next(3), "ABC") << "it was not written this time";
}

TEST_F(ForecastTest, WhatComesManyTimesBetweenTwoWritesIsThereFromTheFirstOn) {
  fetch("AAAB");
  for (int step = 0; step < 2; ++step) {
    write("A");
    fetch("AAAB");
  }
  EXPECT_EQ(next(5), "aaaB.");
  write("A");
  EXPECT_EQ(next(4), "AAAB");
  fetch("A");
  EXPECT_EQ(next(5), "AABa.");
  fetch("AAB");
  fetch("AAAB");
  EXPECT_EQ(next(4), "AAAB") << "it was not written this time";
}

TEST_F(ForecastTest, WhatIsForgottenIsUnknown) {
  fetch("ABCDABCD");
  forget('B');
  EXPECT_EQ(next(4), "A.CD");
  forget('A');
  forget('C');
  forget('D');
  EXPECT_EQ(next(4), "....");
  fetch("EFGEFG");
  EXPECT_EQ(next(3), "EFG");
}

TEST_F(ForecastTest, ALongHistoryIsForgottenInTime) {
  for (int step = 0; step < 40'000; ++step) fetch("ABCDE");
  EXPECT_EQ(forecast.count(), 200'000U);
  EXPECT_EQ(next(5), "ABCDE");
  EXPECT_EQ(forecast.run(), 199'994U);
}

} // namespace
} // namespace offload
