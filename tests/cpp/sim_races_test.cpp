// Which accesses the simulated link reports as unordered, and which it does not.
#include <gtest/gtest.h>

#include "sim_rig.h"

namespace offload {
namespace {

using namespace sim_test;

TEST(SimRaces, FindsKernelThatDoesNotWaitForCopy) {
  expectReport(
      [](Rig& rig) {
        const Bytes source{};
        rig.link.copyToDevice(rig.device, source.data(), size, rig.one);
        rig.link.launch(rig.two, [] {}, {{rig.device, size}}, {});
      },
      {"race: kernel #", "on stream 2 reads bytes [0, 64) of allocation 1 of device 0", "copy to device #", "on stream 1"});
}

TEST(SimRaces, FindsRaceOnOneByteOnly) {
  expectReport(
      [](Rig& rig) {
        rig.link.record(rig.event, rig.one);
        rig.link.wait(rig.two, rig.event);
        auto* bytes = static_cast<std::byte*>(rig.device);
        rig.link.launch(rig.one, [] {}, {}, {{bytes, 17}});
        rig.link.launch(rig.two, [] {}, {{bytes + 16, 8}}, {});
      },
      {"reads bytes [16, 24)", "writes bytes [0, 17)"});
}

TEST(SimRaces, NeighboursAndReadersDoNotRace) {
  expectNoReport([](Rig& rig) {
    rig.link.record(rig.event, rig.one);
    rig.link.wait(rig.two, rig.event);
    auto* bytes = static_cast<std::byte*>(rig.device);
    rig.link.launch(rig.one, [] {}, {{bytes, 32}}, {{bytes + 32, 16}});
    rig.link.launch(rig.two, [] {}, {{bytes, 32}}, {{bytes + 48, 16}});
  });
}

TEST(SimRaces, FindsHostReadBeforeCopyHomeLanded) {
  Bytes home{};
  expectReport(
      [&](Rig& rig) {
        rig.link.copyToHost(home.data(), rig.device, size, rig.one);
        rig.link.record(rig.event, rig.one);
        rig.link.hostAccess(home.data() + 60, 4, Access::Read);
      },
      {"race: access #", "by the host reads 4 host bytes", "copy to host #"});
}

TEST(SimRaces, FindsHostReadAfterTheWrongEvent) {
  Bytes home{};
  expectReport(
      [&](Rig& rig) {
        rig.link.record(rig.event, rig.one);
        rig.link.copyToHost(home.data(), rig.device, size, rig.one);
        rig.link.synchronize(rig.event);
        rig.link.hostAccess(home.data(), size, Access::Read);
      },
      {"race: access #"});
}

TEST(SimRaces, FindsHostWriteDuringCopyOut) {
  const Bytes source{};
  expectReport(
      [&](Rig& rig) {
        rig.link.copyToDevice(rig.device, source.data(), size, rig.one);
        rig.link.hostAccess(source.data(), 1, Access::Write);
      },
      {"by the host writes 1 host bytes", "copy to device #", "reads 64 host bytes"});
}

TEST(SimRaces, HostMayReadDuringCopyOutAndWriteAfterIt) {
  const Bytes source{};
  expectNoReport([&](Rig& rig) {
    rig.link.hostAccess(source.data(), size, Access::Write);
    rig.link.copyToDevice(rig.device, source.data(), size, rig.one);
    rig.link.hostAccess(source.data(), size, Access::Read);
    rig.link.record(rig.event, rig.one);
    while (!rig.link.query(rig.event)) {
    }
    rig.link.hostAccess(source.data(), size, Access::Write);
  });
}

TEST(SimRaces, FindsUnregistrationDuringCopy) {
  const Bytes source{};
  expectReport(
      [&](Rig& rig) {
        rig.link.copyToDevice(rig.device, source.data(), size, rig.one);
        rig.link.unregisterHost(const_cast<unsigned char*>(source.data()), size);
      },
      {"unregistration", "copy to device #"});
}

TEST(SimRaces, FindsHostDrivenUseThatDoesNotWait) {
  expectReport(
      [](Rig& rig) {
        rig.link.fill(rig.device, 6, size, rig.one);
        rig.link.hostAccess(rig.device, 1, Access::Read);
      },
      {"by the host reads bytes [0, 1) of allocation 1", "fill #"});
}

TEST(SimRaces, AHostTasksAccessesCount) {
  for (const bool ordered : {false, true}) {
    const Bytes pageable{};
    const auto body = [&](Rig& rig) {
      rig.link.launchHost({[] {}, {{pageable.data(), size, Access::Write}}}, rig.one);
      rig.link.record(rig.event, rig.one);
      if (ordered) {
        rig.link.synchronize(rig.event);
      }
      rig.link.hostAccess(pageable.data(), size, Access::Read);
    };
    if (ordered) {
      expectNoReport(body);
    } else {
      expectReport(body, {"race: access #", "by the host reads 64 host bytes", "host task #", "on stream 1, which writes"});
    }
  }
}

TEST(SimRaces, ReportsAreOnlyCollectedWithoutFailFast) {
  SimLink link({.failFast = false});
  const Stream one = link.createStream(0);
  const Stream two = link.createStream(0);
  void* device = link.allocate(size, one);
  link.fill(device, 1, size, two);
  link.fill(device, 1, size + 1, one);
  link.drain();
  const auto reports = link.reports();
  ASSERT_EQ(reports.size(), 2U);
  EXPECT_NE(reports[0].find("race: fill #"), std::string::npos);
  EXPECT_NE(reports[1].find("out of the bounds"), std::string::npos);
}

TEST(SimRaces, RaceDetectionCanBeSwitchedOff) {
  SimLink link({.detectRaces = false});
  const Stream one = link.createStream(0);
  const Stream two = link.createStream(0);
  void* device = link.allocate(size, one);
  link.fill(device, 1, size, two);
  EXPECT_THROW(link.fill(device, 1, size + 1, two), Error);
}

} // namespace
} // namespace offload
