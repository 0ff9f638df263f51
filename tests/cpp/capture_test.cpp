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

// What stays is unpinned by a deferred token, which may be asked while its stream is being captured.
TEST(Capture, NothingOfACaptureIsWaitedFor) {
  for (const bool unpinnedBefore : {true, false}) {
    CoreOptions options;
    options.cache.budgetBytes = 1 << 20;
    BasicRig<CapturingLink> rig(options);
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    {
      const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
      rig.readOnDevice(stream, pin.data(), 1000);
      if (!unpinnedBefore) rig.link.captured = stream;
    }
    rig.link.captured = stream;
    rig.write(*block, pattern(2, 1000)); // retires the Slot
    rig.cache.emptyCache(0);
    EXPECT_GT(rig.sim.bytesInUse(0), 0U) << "kept until its uses can be ordered";
    rig.link.captured.device = -1;
    rig.cache.emptyCache(0);
    EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
    rig.sim.drain();
  }
}

// A capture that another thread begins while an event is being recorded for a deferred token.
TEST(Capture, WhatBeginsMeanwhileIsNotWaitedFor) {
  CoreOptions options;
  options.cache.budgetBytes = 1 << 20;
  BasicRig<CapturingLink> rig(options);
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, 1000));
  {
    const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream);
    rig.readOnDevice(stream, pin.data(), 1000);
  }
  rig.link.beforeRecord = [&rig](Stream on) { rig.link.captured = on; };
  rig.cache.emptyCache(0); // asks the reader's token
  EXPECT_EQ(rig.link.captured, stream);
  EXPECT_GT(rig.sim.bytesInUse(0), 0U) << "kept until its uses can be ordered";
  rig.link.captured.device = -1;
  rig.cache.emptyCache(0);
  EXPECT_EQ(rig.sim.bytesInUse(0), 0U);
  rig.sim.drain();
}

} // namespace
} // namespace offload
