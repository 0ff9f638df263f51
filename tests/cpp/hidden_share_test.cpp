#include "core/hidden_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace offload {
namespace {

using Next = HiddenShare::Next;

constexpr std::size_t kSaved = 10'000'000'000;

// A program whose link carries saved bytes, and others, beside a device that computes.
struct Program {
  double forward = 0.05;
  double backward = 0.1;
  double rate = 55e9;
  double othersDown = 0; // bytes a backward, which come first

  // The share that is just hidden.
  double hidden() const {
    const double bytes = std::min(forward * rate, backward * rate - othersDown);
    return std::clamp(bytes / static_cast<double>(kSaved), 0.0, 1.0);
  }

  SavedStep run(double share) const {
    SavedStep step;
    step.candidates = kSaved;
    step.sent = static_cast<std::size_t>(share * kSaved);
    const auto sent = static_cast<double>(step.sent);
    step.up = step.sent;
    step.down = static_cast<std::size_t>(sent + othersDown);
    step.forwardExposed = std::max(0.0, sent / rate - forward);
    step.forward = forward + step.forwardExposed;
    const double withoutSaved = std::max(backward, othersDown / rate);
    step.backwardExposed = std::max(0.0, (sent + othersDown) / rate - withoutSaved);
    step.backward = withoutSaved + step.backwardExposed;
    return step;
  }
};

void train(HiddenShare& share, const Program& program, int steps) {
  for (int step = 0; step < steps; ++step) share.learn(program.run(share.share()));
}

TEST(HiddenShare, AllGoesInTheFirstStep) {
  HiddenShare share;
  EXPECT_EQ(share.share(), 1);
  EXPECT_EQ(share.take(100, 100), Next::Goes);
  EXPECT_EQ(share.take(1, 1), Next::Goes);
}

TEST(HiddenShare, WhatIsHiddenIsKnownAfterOneStep) {
  for (const Program program : {Program{}, Program{.backward = 0.02}, Program{.rate = 25e9}, Program{.othersDown = 4e9}}) {
    HiddenShare share;
    train(share, program, 1);
    EXPECT_NEAR(share.share(), program.hidden(), 0.01);
  }
}

TEST(HiddenShare, AllGoesForGoodWhereTheLinkHidesIt) {
  HiddenShare share;
  train(share, Program{.rate = 500e9}, 100);
  EXPECT_EQ(share.share(), 1);
}

TEST(HiddenShare, NoStepAfterTheFirstIsMuchSlowerThanWithoutIt) {
  const Program program;
  HiddenShare share;
  train(share, program, 1);
  double worst = 0;
  double sum = 0;
  constexpr int steps = 300;
  for (int i = 0; i < steps; ++i) {
    const SavedStep step = program.run(share.share());
    const double slower = (step.forward + step.backward) / (program.forward + program.backward);
    worst = std::max(worst, slower);
    sum += slower;
    share.learn(step);
    EXPECT_GT(share.share(), 0.9 * program.hidden());
  }
  EXPECT_LT(worst, 1.03);
  EXPECT_LT(sum / steps, 1.01);
}

TEST(HiddenShare, NothingIsSentBesideALinkThatOthersFill) {
  HiddenShare share;
  const Program program{.othersDown = 9e9};
  train(share, program, 5);
  EXPECT_LT(share.share(), 0.02);
}

TEST(HiddenShare, FollowsAProgramThatChanges) {
  HiddenShare share;
  train(share, Program{}, 20);
  const Program longer{.forward = 0.1, .backward = 0.2};
  train(share, longer, 160);
  EXPECT_NEAR(share.share(), longer.hidden(), 0.03);
  const Program shorter{.forward = 0.02, .backward = 0.04};
  train(share, shorter, 3);
  EXPECT_NEAR(share.share(), shorter.hidden(), 0.03);
}

TEST(HiddenShare, OneSlowStepChangesLittle) {
  HiddenShare share;
  const Program program;
  train(share, program, 3);
  const double before = share.share();
  SavedStep slow = program.run(before);
  slow.forwardExposed = 0.9 * slow.forward;
  train(share, program, 1);
  share.learn(slow);
  EXPECT_GT(share.share(), 0.9 * before);
  share.learn(slow);
  EXPECT_LT(share.share(), 0.5 * before);
}

TEST(HiddenShare, SlowStepsAreMadeUpFor) {
  HiddenShare share;
  const Program program;
  train(share, program, 3);
  SavedStep slow = program.run(share.share());
  slow.forwardExposed = 0.9 * slow.forward;
  for (int i = 0; i < 2; ++i) share.learn(slow);
  EXPECT_LT(share.share(), 0.2 * program.hidden());
  train(share, program, 100);
  EXPECT_NEAR(share.share(), program.hidden(), 0.03);
}

TEST(HiddenShare, AStepThatSavedNothingTellsNothing) {
  HiddenShare share;
  train(share, Program{}, 1);
  const double before = share.share();
  share.learn({});
  EXPECT_EQ(share.share(), before);
}

TEST(HiddenShare, ShortStepsSendTheirShareTogether) {
  HiddenShare share(0.25);
  int sent = 0;
  for (int i = 0; i < 120; ++i) {
    share.begin();
    sent += share.take(100, 100) == Next::Goes ? 1 : 0;
  }
  EXPECT_EQ(sent, 30);
}

TEST(HiddenShare, WhatGoesIsSpreadEvenly) {
  HiddenShare share;
  train(share, Program{}, 1);
  std::size_t seen = 0;
  std::size_t sent = 0;
  const std::vector<std::size_t> sizes{64, 16, 224, 224, 1, 64};
  for (int layer = 0; layer < 50; ++layer) {
    for (const std::size_t bytes : sizes) {
      seen += bytes;
      sent += share.take(bytes, bytes) == Next::Goes ? bytes : 0;
      const double due = share.share() * static_cast<double>(seen);
      EXPECT_LE(static_cast<double>(sent), due + 1e-6);
      EXPECT_GE(static_cast<double>(sent), due - 224);
    }
  }
}

// Of a step of 20 results, which ones go.
std::vector<int> sentOf(HiddenShare& share, std::size_t underWay, int count = 20) {
  std::vector<int> sent;
  share.begin(underWay);
  for (int i = 0; i < count; ++i) {
    if (share.take(100, 100) == Next::Goes) sent.push_back(i);
  }
  return sent;
}

TEST(HiddenShare, StepsThatAreAlikeSendTheSame) {
  HiddenShare share(0.3);
  const auto first = sentOf(share, 0);
  EXPECT_EQ(first, (std::vector<int>{3, 6, 9, 13, 16, 19}));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(sentOf(share, 0), first);
}

// How many of so many results go.
std::size_t countOf(HiddenShare& share, std::size_t underWay, int count = 80) {
  return sentOf(share, underWay, count).size();
}

TEST(HiddenShare, WhatWouldNotHaveLeftByTheEndOfForwardStays) {
  HiddenShare share(0.25);
  EXPECT_EQ(countOf(share, 200), 20U); // nothing is known yet
  const auto sent = sentOf(share, 200, 80); // a quarter of the last 800 bytes is less than may be under way
  EXPECT_EQ(sent.size(), 18U);
  EXPECT_EQ(sent.back(), 71);
  EXPECT_EQ(share.left(), 0U);
  EXPECT_EQ(countOf(share, 200, 40), 10U); // a shorter one
  EXPECT_EQ(share.left(), 1000U);
  EXPECT_EQ(countOf(share, 100), 19U); // a longer one, of which less was expected: the last 400 of the first 4000 bytes stay
  EXPECT_EQ(countOf(share, 0), 20U);
}

TEST(HiddenShare, NoMoreThanAnEighthStaysForThat) {
  for (const double part : {0.25, 0.9, 0.999}) {
    HiddenShare share(part);
    const std::size_t all = countOf(share, std::size_t{1} << 40);
    const std::size_t most = countOf(share, std::size_t{1} << 40);
    EXPECT_LT(most, all);
    EXPECT_GE(static_cast<double>(most), 0.875 * static_cast<double>(all) - 1);
  }
  HiddenShare everything;
  EXPECT_EQ(countOf(everything, 2000), 80U);
  EXPECT_EQ(countOf(everything, 2000), 80U); // hidden as a whole: the link is faster than what is saved
}

// Of a step of so many results, those that go where no more than `most` bytes may stay.
std::vector<int> sentBeyond(HiddenShare& share, std::size_t most, int count, std::size_t underWay = 0) {
  std::vector<int> sent;
  std::size_t stay = 0;
  share.begin(underWay, most);
  for (int i = 0; i < count; ++i) {
    if (share.take(100, 100, most - stay) == Next::Goes) {
      sent.push_back(i);
    } else {
      stay += 100;
    }
  }
  EXPECT_LE(stay, most);
  return sent;
}

TEST(HiddenShare, WhatMayNotStayGoes) {
  HiddenShare share(0);
  EXPECT_EQ(sentBeyond(share, 1500, 20), (std::vector<int>{15, 16, 17, 18, 19})); // nothing is known yet
  EXPECT_EQ(sentBeyond(share, 1500, 20), (std::vector<int>{3, 7, 11, 15, 19}));
  EXPECT_EQ(share.demanded(), 0.25);
  EXPECT_EQ(sentBeyond(share, 1500, 22), (std::vector<int>{3, 7, 11, 15, 19, 20, 21})); // more than was expected
  EXPECT_EQ(sentBeyond(share, 1500, 12).size(), 3U); // fewer than were
  EXPECT_EQ(sentBeyond(share, 1500, 12), std::vector<int>{});
  EXPECT_EQ(share.share(), 0);
  EXPECT_EQ(sentBeyond(share, 0, 12).size(), 12U);
}

TEST(HiddenShare, WhatIsLateIsOfWhatMayStay) {
  for (const std::size_t most : {8000U, 3500U, 3300U, 3200U}) {
    HiddenShare share(0.6);
    for (int step = 0; step < 3; ++step) {
      const auto sent = sentBeyond(share, most, 80, 300);
      const std::size_t late = step == 0 || most == 3200 ? 0 : most == 3300 ? 1 : 5;
      EXPECT_NEAR(static_cast<double>(sent.size()), 0.6 * static_cast<double>(80 - late), 1) << most;
      EXPECT_NEAR(sent.back(), 79 - static_cast<int>(late), 1) << most;
      EXPECT_FALSE(share.forced());
    }
  }
}

TEST(HiddenShare, WhereMoreGoesThanIsHiddenNothingIsLate) {
  for (const std::size_t most : {200U, 1600U, 6000U}) {
    HiddenShare share(0.1);
    sentBeyond(share, most, 80, 100'000);
    const auto sent = sentBeyond(share, most, 80, 100'000);
    EXPECT_EQ(sent.size(), 80 - most / 100) << most;
    EXPECT_GE(sent.back(), 79 - static_cast<int>(80 / sent.size())) << most;
    EXPECT_TRUE(share.forced());
  }
}

TEST(HiddenShare, WhatStaysIsMemoryAndWhatGoesAreBytes) {
  HiddenShare share(0);
  for (int step = 0; step < 3; ++step) {
    share.begin(0, 6000);
    std::vector<int> sent;
    std::size_t stay = 0;
    for (int i = 0; i < 20; ++i) {
      if (share.take(100, 400, 6000 - stay) == Next::Goes) {
        sent.push_back(i);
      } else {
        stay += 400;
      }
    }
    if (step > 0) {
      EXPECT_EQ(sent, (std::vector<int>{3, 7, 11, 15, 19}));
    }
  }
}

TEST(HiddenShare, AStepThatSavedMoreThanWasExpectedWasForced) {
  HiddenShare share(0);
  sentBeyond(share, 2000, 20);
  EXPECT_FALSE(share.forced());
  sentBeyond(share, 2000, 21);
  EXPECT_TRUE(share.forced());
  sentBeyond(share, 2000, 21);
  EXPECT_TRUE(share.forced()); // as was demanded
  sentBeyond(share, 2000, 20);
  sentBeyond(share, 2000, 20);
  EXPECT_FALSE(share.forced());
}

TEST(HiddenShare, MoreStaysThanTheLinkDemandsOnlyWhereItMay) {
  HiddenShare share(0.5);
  EXPECT_EQ(sentBeyond(share, 6000, 80).size(), 40U);
  EXPECT_EQ(sentBeyond(share, 6000, 80).size(), 40U); // by the share
  EXPECT_EQ(sentBeyond(share, 2000, 80).size(), 60U);
  EXPECT_EQ(share.share(), 0.75);
}

TEST(HiddenShare, StepsThatHadToWaitTeachNothing) {
  const Program program;
  HiddenShare share;
  train(share, program, 20);
  const double hidden = share.share();
  for (int i = 0; i < 20; ++i) {
    SavedStep step = program.run(0.8);
    step.forced = true;
    share.learn(step);
  }
  EXPECT_EQ(share.share(), hidden);
  const Program faster{.forward = 0.2, .backward = 0.4};
  SavedStep step = faster.run(0.8);
  step.forced = true;
  share.learn(step);
  EXPECT_GE(share.share(), 0.8);
  EXPECT_LT(share.share(), 0.9);
}

} // namespace
} // namespace offload
