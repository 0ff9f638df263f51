// Tokens: what they know, whom they order, and that sets of them stay small.
#include <thread>

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

/// Counts what the link below is asked for, and can hold a thread that records back.
class CountingLink final : public FaultLink {
 public:
  using FaultLink::FaultLink;
  Event createEvent(int device) override {
    ++events;
    return FaultLink::createEvent(device);
  }
  void wait(Stream stream, Event event) override {
    ++waits;
    FaultLink::wait(stream, event);
  }
  void record(Event event, Stream stream) override {
    if (hold.exchange(false)) {
      held = true;
      while (held) {
        std::this_thread::yield();
      }
    }
    FaultLink::record(event, stream);
  }
  std::uint64_t captureOf(Stream stream) override {
    return capture != 0 ? capture : FaultLink::captureOf(stream);
  }
  std::uint64_t capture = 0; // of all streams
  std::atomic<int> events{0};
  std::atomic<int> waits{0};
  std::atomic<bool> hold{false};
  std::atomic<bool> held{false};
};

struct TokenRig {
  explicit TokenRig(std::uint64_t seed = 0) : sim({.seed = seed, .devices = 2, .bias = SimBias::Late}), link(sim), pool(link) {}

  SimLink sim;
  CountingLink link;
  EventPool pool;
  Stream one = sim.createStream(0);
  Stream two = sim.createStream(0);
};

TEST(Token, ADefaultOneIsDone) {
  const Token token;
  EXPECT_TRUE(token.done());
  EXPECT_TRUE(token.knownDone());
  token.wait();
  token.orderBefore({});
}

TEST(Token, ADeferredOneHasItsPlaceWhereItIsFirstAsked) {
  TokenRig rig;
  int ran = 0;
  rig.sim.launchHost([&] { ++ran; }, rig.one);
  const Token token = rig.pool.defer(rig.one);
  EXPECT_EQ(rig.link.events, 0);
  rig.sim.launchHost([&] { ++ran; }, rig.one);
  token.wait();
  EXPECT_EQ(ran, 2);
  EXPECT_EQ(rig.link.events, 1);
}

TEST(Token, DeferredOnesOfAStreamAreOneUntilSomebodyAsks) {
  TokenRig rig;
  int ran = 0;
  const Token token = rig.pool.defer(rig.one);
  const Token same = rig.pool.defer(rig.one);
  const Token other = rig.pool.defer(rig.two);
  rig.sim.launchHost([&] { ++ran; }, rig.one);
  same.wait();
  EXPECT_EQ(ran, 1);
  EXPECT_TRUE(token.knownDone());
  EXPECT_FALSE(other.knownDone());
  EXPECT_EQ(rig.link.events, 1);
}

TEST(Token, OneThatIsDeferredAfterAnotherWasAskedCoversWhatCameBetween) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    TokenRig rig(seed);
    bool ran = false;
    const Token early = rig.pool.defer(rig.one);
    (void)early.done();
    rig.sim.launchHost([&] { ran = true; }, rig.one);
    rig.pool.defer(rig.one).wait();
    EXPECT_TRUE(ran);
  }
}

TEST(Token, ADeferredOneImpliesAllThatWereThereBefore) {
  TokenRig rig;
  TokenSet set;
  for (int k = 0; k < 10; ++k) {
    set.add(rig.pool.record(rig.one));
    set.add(rig.pool.defer(rig.one));
    set.add(rig.pool.defer(rig.two));
  }
  EXPECT_EQ(set.all().size(), 2U);
  // Once it has its place, it implies what was recorded before that only.
  const Token early = rig.pool.defer(rig.one);
  (void)early.done();
  const Token late = rig.pool.record(rig.one);
  EXPECT_TRUE(early.impliedBy(late));
  EXPECT_FALSE(late.impliedBy(early));
}

TEST(Token, IsDoneWhenItsPlaceHasBeenReached) {
  TokenRig rig;
  bool ran = false;
  rig.sim.launchHost([&] { ran = true; }, rig.one);
  const Token token = rig.pool.record(rig.one);
  EXPECT_FALSE(token.knownDone());
  token.wait();
  EXPECT_TRUE(ran);
  EXPECT_TRUE(token.knownDone());
}

TEST(Token, KnowsWhatItHasAsked) {
  TokenRig rig;
  const Token token = rig.pool.record(rig.one);
  const Token copy = token;
  rig.sim.drain();
  EXPECT_FALSE(token.knownDone());
  EXPECT_TRUE(token.done());
  EXPECT_TRUE(copy.knownDone());
}

TEST(Token, OrdersOtherStreams) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    TokenRig rig(seed);
    void* const data = rig.sim.allocate(64, rig.one);
    const Token allocated = rig.pool.record(rig.one);
    allocated.orderBefore(rig.two);
    ASSERT_NO_THROW(rig.sim.fill(data, 1, 64, rig.two)) << "seed " << seed;
    rig.pool.record(rig.two).orderBefore(rig.one);
    ASSERT_NO_THROW(rig.sim.free(data, rig.one)) << "seed " << seed;
    ASSERT_NO_THROW(rig.sim.drain()) << "seed " << seed;
  }
}

TEST(Token, AStreamWaitsOnceForAPlaceAndAllBeforeIt) {
  TokenRig rig;
  const Stream three = rig.sim.createStream(0);
  const Token early = rig.pool.record(rig.one);
  const Token place = rig.pool.record(rig.one);
  place.orderBefore(rig.two);
  EXPECT_EQ(rig.link.waits, 1);
  for (const Token& token : {early, place, Token(early)}) {
    EXPECT_TRUE(token.isBefore(rig.two));
    token.orderBefore(rig.two);
    EXPECT_FALSE(token.isBefore(three));
    EXPECT_FALSE(token.knownDone());
  }
  EXPECT_EQ(rig.link.waits, 1);
  const Token late = rig.pool.record(rig.one);
  const Token elsewhere = rig.pool.record(three);
  EXPECT_FALSE(late.isBefore(rig.two));
  EXPECT_FALSE(elsewhere.isBefore(rig.two));
  late.orderBefore(rig.two);
  place.orderBefore(rig.two); // which changes nothing about `late`
  late.orderBefore(rig.two);
  EXPECT_EQ(rig.link.waits, 2);
  early.orderBefore(three);
  EXPECT_EQ(rig.link.waits, 3);
  EXPECT_FALSE(place.isBefore(three));
}

TEST(Token, AWaitForWhatWasDeferredIsNoneForWhatComesBeforeItsPlaceWasSettled) {
  TokenRig rig;
  const Token deferred = rig.pool.defer(rig.one);
  const Token between = rig.pool.record(rig.one);
  EXPECT_FALSE(deferred.isBefore(rig.two));
  between.orderBefore(rig.two);
  EXPECT_FALSE(deferred.isBefore(rig.two)); // it means a place that nobody knows yet
  deferred.orderBefore(rig.two);
  EXPECT_EQ(rig.link.waits, 2);
}

TEST(Token, AWaitThatWasRefusedIsNone) {
  TokenRig rig;
  const Token token = rig.pool.record(rig.one);
  rig.link.fail(1);
  EXPECT_THROW(token.orderBefore(rig.two), Error);
  EXPECT_FALSE(token.isBefore(rig.two));
  token.orderBefore(rig.two);
  EXPECT_TRUE(token.isBefore(rig.two));
}

TEST(Token, WaitsOfManyStreamsAreForgottenAndAskedForAgain) {
  TokenRig rig;
  const Token token = rig.pool.record(rig.one);
  std::vector<Stream> streams;
  for (int k = 0; k < 200; ++k) streams.push_back(rig.sim.createStream(0));
  for (const Stream stream : streams) token.orderBefore(stream);
  EXPECT_EQ(rig.link.waits, 200);
  EXPECT_TRUE(token.isBefore(streams.back()));
  EXPECT_FALSE(token.isBefore(streams.front()));
  token.orderBefore(streams.front());
  EXPECT_EQ(rig.link.waits, 201);
}

TEST(Token, DefaultStreamsOfTwoDevicesAreTwoStreams) {
  TokenRig rig;
  const Token token = rig.pool.record({0, nullptr});
  token.orderBefore({0, nullptr});
  EXPECT_EQ(rig.link.waits, 0);
  token.orderBefore({1, nullptr});
  EXPECT_EQ(rig.link.waits, 1);
}

TEST(Token, StreamsThatHaveOneHandleAfterAnotherAreTwoStreams) {
  TokenRig rig;
  Stream later = rig.one;
  later.id = 1;
  const Token before = rig.pool.record(rig.one);
  EXPECT_FALSE(before.isOn(later));
  before.orderBefore(later);
  EXPECT_EQ(rig.link.waits, 1);
  TokenSet both;
  both.add(before);
  both.add(rig.pool.record(later));
  EXPECT_EQ(both.all().size(), 2U);
  StreamSet streams(rig.one);
  streams.add(later);
  EXPECT_EQ(streams.end() - streams.begin(), 2);
  rig.sim.drain();
}

TEST(Token, ARecycledEventKeepsTheOrderGivenBefore) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    TokenRig rig(seed);
    void* const data = rig.sim.allocate(64, rig.one);
    rig.pool.record(rig.one).orderBefore(rig.two);
    rig.pool.record(rig.two); // the same event, on another stream
    EXPECT_EQ(rig.link.events, 1);
    ASSERT_NO_THROW(rig.sim.fill(data, 1, 64, rig.two)) << "seed " << seed;
    rig.pool.record(rig.two).orderBefore(rig.one);
    rig.sim.free(data, rig.one);
    ASSERT_NO_THROW(rig.sim.drain()) << "seed " << seed;
  }
}

TEST(Token, MayOutliveItsPool) {
  SimLink sim;
  const Stream stream = sim.createStream(0);
  Token token;
  {
    EventPool pool(sim);
    token = pool.record(stream);
  }
  token.wait();
  EXPECT_TRUE(token.done());
}

TEST(Token, OfARefusedEventIsRecordedWhenItIsAsked) {
  for (const std::uint64_t refused : {1, 2}) { // the creation, the recording
    TokenRig rig;
    bool ran = false;
    rig.sim.launchHost([&] { ran = true; }, rig.one);
    rig.link.fail(refused);
    const Token token = rig.pool.record(rig.one);
    EXPECT_EQ(rig.link.failures(), 1U);
    token.wait();
    EXPECT_TRUE(ran);
  }
}

TEST(Token, OfARefusedEventBecomesNoPartOfACapture) {
  for (const std::uint64_t refused : {1, 2}) {
    TokenRig rig;
    rig.link.fail(refused);
    const Token token = rig.pool.record(rig.one);
    EXPECT_EQ(rig.link.failures(), 1U);
    rig.link.capture = 7;
    EXPECT_THROW(token.orderBefore(rig.two), Error);
    EXPECT_THROW(token.done(), Error);
    EXPECT_EQ(rig.link.waits, 0);
    rig.link.capture = 0;
    token.orderBefore(rig.two);
    EXPECT_EQ(rig.link.waits, 1);
  }
}

TEST(Token, OfALostDeviceThrowsWhenItIsAsked) {
  TokenRig rig;
  rig.link.fail(1, Failing::FromThenOn);
  const Token token = rig.pool.record(rig.one);
  EXPECT_THROW(token.done(), Error);
  EXPECT_THROW(token.wait(), Error);
  EXPECT_THROW(token.orderBefore(rig.two), Error);
  EXPECT_FALSE(token.knownDone());
  rig.link.fail(0);
}

TEST(TokenSet, HoldsTheLastTokenOfEachStream) {
  TokenRig rig;
  TokenSet set;
  for (int repeat = 0; repeat < 1000; ++repeat) {
    set.add(rig.pool.record(rig.one));
    set.add(rig.pool.record(rig.two));
  }
  EXPECT_EQ(set.all().size(), 2U);
  EXPECT_LE(rig.link.events, 3);
  bool ran = false;
  rig.sim.launchHost([&] { ran = true; }, rig.two);
  set.add(rig.pool.record(rig.two));
  for (const Token& token : set.all()) {
    token.wait();
  }
  EXPECT_TRUE(ran);
  set.prune();
  EXPECT_TRUE(set.empty());
}

TEST(TokenSet, AnEarlierTokenThatComesLateReplacesNothing) {
  TokenRig rig;
  const Token earlier = rig.pool.record(rig.one);
  bool ran = false;
  rig.sim.launchHost([&] { ran = true; }, rig.one);
  TokenSet set;
  set.add(rig.pool.record(rig.one));
  set.add(earlier);
  for (const Token& token : set.all()) {
    token.wait();
  }
  EXPECT_TRUE(ran);
}

TEST(TokenSet, OfThreadsThatRecordAtOnceNoneIsTheEarlierOne) {
  TokenRig rig;
  TokenSet set;
  Token slow;
  rig.link.hold = true;
  std::thread thread([&] { slow = rig.pool.record(rig.one); });
  while (!rig.link.held) {
    std::this_thread::yield();
  }
  const Token fast = rig.pool.record(rig.one);
  bool ran = false;
  rig.sim.launchHost([&] { ran = true; }, rig.one); // what `slow` covers and `fast` doesn't
  rig.link.held = false;
  thread.join();
  set.add(slow);
  set.add(fast);
  for (const Token& token : set.all()) {
    token.wait();
  }
  EXPECT_TRUE(ran);
}

TEST(TokenSet, ATokenThatCouldNotBeRecordedIsNotTakenForAnEarlierOne) {
  TokenRig rig;
  TokenSet set;
  rig.link.fail(1);
  set.add(rig.pool.record(rig.one));
  set.add(rig.pool.record(rig.one));
  EXPECT_EQ(set.all().size(), 2U);
}

TEST(TokenSet, NeedsNoDoneTokens) {
  TokenRig rig;
  TokenSet set;
  set.add(Token());
  const Token token = rig.pool.record(rig.one);
  token.wait();
  set.add(token);
  EXPECT_TRUE(set.empty());
}

TEST(EventPool, ThreadsRecordAtOnce) {
  SimLink sim;
  EventPool pool(sim);
  const Stream stream = sim.createStream(0);
  std::mutex mutex;
  TokenSet shared;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 500; ++repeat) {
        Token token = pool.record(stream);
        const std::lock_guard lock(mutex);
        shared.add(std::move(token));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_LE(shared.all().size(), 8U);
  for (const Token& token : shared.all()) {
    token.wait();
  }
}

TEST(EventPool, ThreadsThatFindATokenUnrecordedAgree) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    TokenRig rig;
    bool ran = false;
    rig.sim.launchHost([&] { ran = true; }, rig.one);
    rig.link.fail(1);
    const Token token = rig.pool.record(rig.one);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&] { token.wait(); });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    EXPECT_TRUE(ran);
  }
}

} // namespace
} // namespace offload
