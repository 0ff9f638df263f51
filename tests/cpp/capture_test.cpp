// Streams that are being captured into a CUDA graph: what is refused meanwhile, and what is made up for afterwards.
#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

class CapturingLink final : public FaultLink {
 public:
  using FaultLink::FaultLink;
  std::uint64_t captureOf(Stream stream) override {
    return stream == captured ? 1 : 0;
  }
  void record(Event event, Stream stream) override {
    EXPECT_FALSE(stream == captured);
    if (beforeRecord) std::exchange(beforeRecord, nullptr)(stream);
    FaultLink::record(event, stream);
  }
  std::function<void(Stream)> beforeRecord;
  Stream captured{-1, nullptr};
};

TEST(Capture, CaptureIsRefused) {
  BasicRig<CapturingLink> rig;
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  rig.link.captured = stream;
  EXPECT_THROW(rig.cache.fetch(*block, {0, 1000}, stream), Error);
  EXPECT_THROW(rig.cache.store(*block, {0, 1000}, nullptr, stream), Error);
  EXPECT_THROW(rig.cache.adopt(*block, rig.newResult(stream, pattern(2, 1000)), stream), Error);
  rig.cache.validate(*block);
  rig.link.captured.device = -1;
  rig.cache.emptyCache(0);
  EXPECT_EQ(rig.owned, 0);
  EXPECT_EQ(rig.read(*block), pattern(1, 1000));
}

TEST(Capture, AnUnpinDuringCaptureIsMadeUpFor) {
  BasicRig<CapturingLink> rig;
  const Stream stream = rig.sim.createStream(0);
  const Stream other = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  {
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    rig.readOnDevice(stream, pin.data(), 1000);
    rig.link.captured = stream;
  }
  rig.cache.fetch(*block, {0, 1000}, other);
  EXPECT_EQ(rig.cache.stats(0).pinnedBytes, 1000U);
  EXPECT_EQ(rig.cache.emptyCache(0), 0U);
  rig.link.captured.device = -1;
  rig.cache.fetch(*block, {0, 1000}, other);
  EXPECT_EQ(rig.cache.stats(0).pinnedBytes, 0U);
  EXPECT_EQ(rig.cache.emptyCache(0), 1000U);
  rig.sim.drain();
}

// Else the event would be one of the graph, and the stream that waits for it a part of that.
TEST(Capture, ATokenThatWasRefusedGetsItsPlaceWhenTheCaptureIsOver) {
  BasicRig<CapturingLink> rig;
  const Stream stream = rig.sim.createStream(0);
  const Stream other = rig.sim.createStream(0);
  EventPool events(rig.link);
  rig.link.fail(2); // to record the event
  const Token token = events.record(stream);
  EXPECT_EQ(rig.link.failures(), 1U);
  rig.link.fail(0);
  rig.link.captured = stream;
  EXPECT_THROW(token.orderBefore(other), Error);
  rig.link.captured.device = -1;
  token.orderBefore(other);
  token.wait();
}

/// What stays, and has been read on a stream: it is unpinned by a deferred token, which may be asked while that is being captured.
class CaptureOfAReader : public ::testing::Test {
 protected:
  static CoreOptions withBudget() {
    CoreOptions options;
    options.cache.budgetBytes = 1 << 20;
    return options;
  }
  void read(bool capturedBefore) {
    const Pin pin = rig_.cache.fetch(*block_, {0, 1000}, stream_);
    rig_.readOnDevice(stream_, pin.data(), 1000);
    if (capturedBefore) rig_.link.captured = stream_;
  }
  void expectKeptUntilTheEnd() {
    rig_.cache.emptyCache(0); // asks the reader's token
    EXPECT_EQ(rig_.link.captured, stream_);
    EXPECT_GT(rig_.sim.bytesInUse(0), 0U) << "kept until its uses can be ordered";
    rig_.link.captured.device = -1;
    rig_.cache.emptyCache(0);
    EXPECT_EQ(rig_.sim.bytesInUse(0), 0U);
    rig_.sim.drain();
  }

  BasicRig<CapturingLink> rig_{withBudget()};
  const Stream stream_ = rig_.sim.createStream(0);
  const BasicRig<CapturingLink>::BlockPtr block_ = rig_.newBlock(pattern(1, 1000));
};

TEST_F(CaptureOfAReader, IsNotWaitedFor) {
  for (const bool capturedBefore : {false, true}) {
    read(capturedBefore);
    rig_.link.captured = stream_;
    rig_.write(*block_, pattern(2, 1000)); // retires the Slot
    expectKeptUntilTheEnd();
  }
}

// As another thread begins it while an event is being recorded for the token.
TEST_F(CaptureOfAReader, IsNotWaitedForThatBeginsMeanwhile) {
  read(false);
  rig_.link.beforeRecord = [this](Stream on) { rig_.link.captured = on; };
  expectKeptUntilTheEnd();
}

} // namespace
} // namespace offload
