// How long streams wait for copies: what counts and what does not, and that nothing depends on whether it can be measured.
#include "core/stall_meter.h"

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;
using Microseconds = std::chrono::duration<double, std::micro>;

constexpr std::size_t kBytes = StallMeter::kLeastBytes;

// Nothing runs but what somebody waits for.
SimOptions options(bool tellsTime = true) {
  return {.bias = SimBias::Late, .maxPending = SIZE_MAX, .tellsTime = tellsTime};
}

struct MeterRig {
  explicit MeterRig(bool tellsTime = true) : sim(options(tellsTime)), link(sim) {}
  ~MeterRig() {
    EXPECT_EQ(sim.reports(), std::vector<std::string>());
  }

  /// A point of the stream `copies` behind so many operations, each of which takes a microsecond.
  Token behind(int operations) {
    for (int i = 1; i < operations; ++i) sim.launch(copies, [this] { ++ran; }, {}, {});
    return events.record(copies);
  }
  void wait(const Token& copy) {
    meter.orderBefore(copy, kBytes, compute);
  }
  /// Runs what there is on a stream, and elsewhere only what that waits for.
  void finish(Stream stream) {
    Event end = sim.createEvent(stream.device);
    sim.record(end, stream);
    sim.synchronize(end);
    sim.destroyEvent(end);
  }
  std::int64_t timers() const {
    return link.use().events - eventsOfTokens;
  }

  SimLink sim;
  FaultLink link;
  EventPool events{link};
  StallMeter meter{link, 0};
  Stream copies = sim.createStream(0);
  Stream compute = sim.createStream(0);
  std::int64_t eventsOfTokens = 0;
  int ran = 0;
};

TEST(StallMeter, AStreamThatHasNothingElseToDoWaitsUntilTheCopyHasLanded) {
  MeterRig rig;
  rig.wait(rig.behind(20));
  EXPECT_EQ(rig.meter.stats().count, 0U); // it may go on for ever
  rig.finish(rig.compute);
  EXPECT_EQ(rig.ran, 19);
  EXPECT_EQ(rig.meter.stats().count, 1U);
  EXPECT_NEAR(Microseconds(rig.meter.stats().time).count(), 22, 1e-6); // the wait and the second timer take one each
}

TEST(StallMeter, WhatComesAfterTheCopyHasLandedDoesNotWait) {
  MeterRig rig;
  const Token copy = rig.behind(20);
  rig.wait(copy);
  rig.finish(rig.copies);
  rig.finish(rig.compute);
  EXPECT_EQ(rig.meter.stats().count, 0U);
  EXPECT_EQ(rig.meter.stats().time.count(), 0);
}

TEST(StallMeter, WhatNeedsNoOrderIsNotTimed) {
  MeterRig rig;
  const Token copy = rig.behind(20);
  const Token done = rig.events.record(rig.compute);
  done.wait();
  rig.eventsOfTokens = rig.link.use().events;
  rig.meter.orderBefore(copy, kBytes, rig.copies);
  rig.meter.orderBefore(copy, kBytes - 1, rig.compute);
  rig.meter.orderBefore(std::vector{done, Token()}, rig.copies);
  EXPECT_EQ(rig.timers(), 0);
}

TEST(StallMeter, OneWaitForSeveralIsOne) {
  MeterRig rig;
  const Stream other = rig.sim.createStream(0);
  rig.sim.launch(other, [] {}, {}, {});
  rig.meter.orderBefore(std::vector{rig.behind(20), rig.events.record(other)}, rig.compute);
  rig.finish(rig.compute);
  EXPECT_EQ(rig.meter.stats().count, 1U);
  EXPECT_NEAR(Microseconds(rig.meter.stats().time).count(), 25, 1e-6);
}

TEST(StallMeter, TimersAreUsedAgain) {
  MeterRig rig;
  for (int round = 1; round <= 8; ++round) {
    for (int k = 0; k < 200; ++k) rig.wait(rig.behind(20));
    rig.finish(rig.compute);
    EXPECT_EQ(rig.meter.stats().count, 200U * round);
    EXPECT_EQ(rig.link.use().events, 400 + 1); // and that of a token
  }
}

TEST(StallMeter, TimersAreReadThoughNobodyAsks) {
  MeterRig rig;
  for (int k = 0; k < 2000; ++k) {
    rig.wait(rig.behind(20));
    rig.finish(rig.compute);
  }
  EXPECT_LE(rig.link.use().events, 2 * 300);
  EXPECT_EQ(rig.meter.stats().count, 2000U);
}

TEST(StallMeter, ThereIsAnEndOfTimersWhereADeviceDoesNothing) {
  MeterRig rig;
  rig.wait(rig.behind(20));
  for (int k = 1; k < 10'000; ++k) rig.wait(rig.behind(1));
  EXPECT_EQ(rig.link.use().events, 2 * 8192 + 1);
  rig.finish(rig.compute);
  EXPECT_EQ(rig.ran, 19);
}

TEST(StallMeter, WhereTheLinkTellsNoTimeTheOrderIsTheSame) {
  MeterRig rig(false);
  rig.wait(rig.behind(20));
  EXPECT_EQ(rig.link.use().events, 1);
  rig.finish(rig.compute);
  EXPECT_EQ(rig.ran, 19);
  EXPECT_EQ(rig.meter.stats().count, 0U);
}

// The order, or an error; and the next one is measured again.
TEST(StallMeter, WhateverCallFailsNothingElseDoes) {
  int refused = 0;
  bool passed = false;
  for (std::uint64_t n = 1; !passed; ++n) {
    ASSERT_LT(n, 100U);
    MeterRig rig;
    const Token copy = rig.behind(20);
    rig.link.fail(n);
    try {
      rig.wait(copy);
      rig.finish(rig.compute);
      EXPECT_EQ(rig.ran, 19);
    } catch (const Error&) {
      ++refused; // to wait
    }
    const std::uint64_t counted = rig.meter.stats().count;
    passed = rig.link.failures() == 0;
    EXPECT_EQ(counted, passed ? 1U : 0U);
    rig.link.fail(0);
    rig.wait(rig.behind(20));
    rig.finish(rig.compute);
    EXPECT_EQ(rig.meter.stats().count, counted + 1);
  }
  EXPECT_EQ(refused, 1);
}

TEST(StallMeter, ACacheCountsWhatStreamsOfItsUsersWaitFor) {
  Rig rig({options()});
  const Stream busy = rig.sim.createStream(0);
  const Stream stream = rig.sim.createStream(0);
  const auto one = rig.newBlock(pattern(1, kBytes));
  const auto two = rig.newBlock(pattern(2, kBytes));
  const auto countedAfter = [&](Stream on) {
    const Event end = rig.sim.createEvent(0);
    rig.sim.record(end, on);
    rig.sim.synchronize(end);
    rig.sim.destroyEvent(end);
    return rig.cache.stallStats(0).count;
  };
  const auto work = [&] {
    for (int k = 0; k < 20; ++k) rig.sim.launch(busy, [] {}, {}, {});
  };
  const DeviceBuffer ofBusy = rig.newResult(busy, pattern(3, kBytes));
  const DeviceBuffer result = rig.newResult(stream, pattern(4, kBytes));
  EXPECT_EQ(countedAfter(stream), 0U);

  work();
  rig.cache.store(*one, {0, kBytes}, ofBusy.data, busy);
  {
    const Pin pin = rig.cache.fetch(*one, {0, kBytes}, stream); // behind a copy home that is behind that work
    EXPECT_EQ(countedAfter(stream), 1U);
    const Pin again = rig.cache.fetch(*one, {0, kBytes}, stream);
    EXPECT_EQ(countedAfter(stream), 1U);
  }
  work();
  rig.cache.store(*one, {0, kBytes}, ofBusy.data, busy);
  rig.cache.store(*two, {0, kBytes}, result.data, stream); // copies home share a stream
  EXPECT_EQ(countedAfter(stream), 2U);
  EXPECT_EQ(countedAfter(busy), 2U);
  EXPECT_EQ(rig.read(*one), pattern(3, kBytes));
  EXPECT_EQ(rig.read(*two), pattern(4, kBytes));
}

} // namespace
} // namespace offload
