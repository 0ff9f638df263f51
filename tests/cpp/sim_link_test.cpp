// How the simulated link runs what it is given: order, lateness, seeds, events, host tasks, threads.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>

#include "sim_rig.h"

namespace offload {
namespace {

using namespace sim_test;

TEST(SimLink, NothingRunsBeforeSomebodyMustSeeIt) {
  Rig rig(1);
  Bytes home = filledWith(7);
  bool ran = false;
  rig.link.launchHost([&] { ran = true; }, rig.two);
  rig.link.copyToHost(home.data(), rig.device, size, rig.one);
  EXPECT_EQ(home, filledWith(7));
  EXPECT_FALSE(ran);
  rig.link.drain();
  EXPECT_EQ(home, filledWith(SimMemory::freshByte));
  EXPECT_TRUE(ran);
}

TEST(SimLink, LateRunsOnlyWhatIsNeededAndEagerRunsOthersToo) {
  for (const SimBias bias : {SimBias::Late, SimBias::Eager}) {
    int strays = 0;
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
      SimLink link({.seed = seed, .bias = bias});
      const Stream one = link.createStream(0);
      const Stream two = link.createStream(0);
      const Event event = link.createEvent(0);
      bool needed = false;
      link.launchHost([&] { ++strays; }, two);
      link.launchHost([&] { needed = true; }, one);
      link.record(event, one);
      link.launchHost([&] { ++strays; }, one);
      link.synchronize(event);
      EXPECT_TRUE(needed);
      if (bias == SimBias::Late) {
        EXPECT_EQ(strays, 0);
      }
      const int before = strays;
      link.drain();
      strays = before;
    }
    EXPECT_EQ(strays > 0, bias == SimBias::Eager);
  }
}

TEST(SimLink, SameSeedSameOrderAndOtherSeedsOtherOrders) {
  const auto orderOf = [](std::uint64_t seed) {
    SimLink link({.seed = seed});
    const Stream one = link.createStream(0);
    const Stream two = link.createStream(0);
    std::string order;
    for (char name = 'a'; name < 'e'; ++name) {
      link.launchHost([&order, name] { order += name; }, one);
      link.launchHost([&order, name] { order += static_cast<char>(name - 'a' + 'A'); }, two);
    }
    link.drain();
    return std::pair(order, link.trace());
  };
  std::set<std::string> orders;
  std::set<std::uint64_t> traces;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    const auto [order, trace] = orderOf(seed);
    EXPECT_EQ(orderOf(seed), std::pair(order, trace));
    orders.insert(order);
    traces.insert(trace);
  }
  EXPECT_GT(orders.size(), 40U); // of 70
  EXPECT_EQ(orders.size(), traces.size());
}

TEST(SimLink, StreamsRunTheirWorkInOrder) {
  expectNoReport([](Rig& rig) {
    const Bytes source = filledWith(3);
    Bytes home{};
    rig.link.copyToDevice(rig.device, source.data(), size, rig.one);
    rig.link.fill(rig.device, 4, size / 2, rig.one);
    rig.link.copyToHost(home.data(), rig.device, size, rig.one);
    rig.link.record(rig.event, rig.one);
    rig.link.synchronize(rig.event);
    rig.link.hostAccess(home.data(), size, Access::Read);
    EXPECT_EQ(home[0], 4);
    EXPECT_EQ(home[size - 1], 3);
  });
}

TEST(SimLink, EventsOrderStreams) {
  expectNoReport([](Rig& rig) {
    const Bytes source = filledWith(3);
    rig.link.copyToDevice(rig.device, source.data(), size, rig.one);
    rig.link.record(rig.event, rig.one);
    rig.link.wait(rig.two, rig.event);
    unsigned char found = 0;
    rig.link.launch(rig.two, [&] { found = *static_cast<unsigned char*>(rig.device); }, {{rig.device, size}}, {});
    rig.link.drain();
    EXPECT_EQ(found, 3);
  });
}

TEST(SimLink, CopiesAtOnceRunInAnyOrderAndInThatOfTheirStream) {
  std::set<std::uint64_t> traces;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Rig rig(seed);
    auto* const device = static_cast<unsigned char*>(rig.device);
    std::vector<Copy> copies;
    for (unsigned char k = 0; k < 3; ++k) {
      rig.host[k] = k + 1;
      copies.push_back({device + 2 - k, &rig.host[k], 1});
    }
    const std::uint64_t before = rig.link.trace();
    rig.link.fill(device, 9, size, rig.one);
    rig.link.copyAllToDevice(copies, rig.one);
    EXPECT_EQ(rig.link.trace(), before) << "nothing runs before somebody must see it";
    rig.link.record(rig.event, rig.one);
    rig.link.synchronize(rig.event);
    EXPECT_EQ((std::vector<int>{device[0], device[1], device[2], device[3]}), (std::vector<int>{3, 2, 1, 9}));
    rig.link.hostAccess(rig.host.data(), size, Access::Write);
    traces.insert(rig.link.trace());
    EXPECT_TRUE(rig.link.reports().empty());
  }
  EXPECT_EQ(traces.size(), 6U);
}

TEST(SimLink, NothingOrdersCopiesAtOnceAmongEachOtherOrAgainstOthers) {
  const auto copyBoth = [](Rig& rig, std::size_t at) {
    auto* const device = static_cast<std::byte*>(rig.device);
    const std::array<Copy, 2> copies{{{device, rig.host.data(), 8}, {device + at, rig.host.data(), 8}}};
    rig.link.copyAllToDevice(copies, rig.one);
  };
  expectReport([&](Rig& rig) { copyBoth(rig, 7); }, {"race: copy to device", "copy to device"});
  expectNoReport([&](Rig& rig) { copyBoth(rig, 8); });
  expectReport(
      [&](Rig& rig) {
        copyBoth(rig, 8);
        rig.link.fill(static_cast<std::byte*>(rig.device) + 15, 1, 1, rig.two);
      },
      {"race: fill", "copy to device"});
  expectReport(
      [&](Rig& rig) {
        copyBoth(rig, 8);
        rig.link.hostAccess(rig.host.data() + 7, 1, Access::Write);
      },
      {"race: access", "copy to device"});
  expectReport([&](Rig& rig) { copyBoth(rig, size); }, {"copy to device"});
  expectReport(
      [](Rig& rig) {
        const Copy copy{rig.device, rig.host.data(), 8};
        rig.link.copyAllToDevice({&copy, 1}, {0, nullptr});
      },
      {"at once on the default stream"});
}

TEST(SimLink, RecordingAgainMovesTheEventButNotTheWaits) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    SimLink link({.seed = seed, .bias = SimBias::Late});
    const Stream one = link.createStream(0);
    const Stream two = link.createStream(0);
    const Event moved = link.createEvent(0);
    const Event last = link.createEvent(0);
    std::string order;
    link.launchHost([&] { order += 'a'; }, one);
    link.record(moved, one);
    link.wait(two, moved);
    link.launchHost([&] { order += 'b'; }, one);
    link.record(moved, one);
    link.record(last, two);
    link.synchronize(last);
    EXPECT_EQ(order, "a");
    link.synchronize(moved);
    EXPECT_EQ(order, "ab");
  }
}

TEST(SimLink, AnEventNeverRecordedHasHappened) {
  Rig rig(1);
  EXPECT_TRUE(rig.link.query(rig.event));
  rig.link.synchronize(rig.event);
  rig.link.wait(rig.one, rig.event);
  rig.link.wait({0, nullptr}, rig.event);
}

TEST(SimLink, DestroyedEventsAndStreamsKeepTheirEffect) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Rig rig(seed);
    const Bytes source = filledWith(9);
    Bytes home{};
    const Event event = rig.link.createEvent(0);
    const Stream stream = rig.link.createStream(0);
    rig.link.copyToDevice(rig.device, source.data(), size, rig.one);
    rig.link.record(event, rig.one);
    rig.link.wait(stream, event);
    rig.link.destroyEvent(event);
    rig.link.copyToHost(home.data(), rig.device, size, stream);
    rig.link.destroyStream(stream);
    EXPECT_THROW(rig.link.record(rig.event, stream), Error);
    EXPECT_THROW(rig.link.query(event), Error);
    EXPECT_EQ(rig.link.reports().size(), 2U);
    rig.link.drain();
    EXPECT_EQ(home, source);
  }
}

TEST(SimLink, TheNullStreamIsTheHost) {
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Rig rig(seed);
    const Stream host{0, nullptr};
    Bytes home = filledWith(5);
    void* device = rig.link.allocate(size, host);
    EXPECT_EQ(*static_cast<unsigned char*>(device), SimMemory::freshByte);
    rig.link.copyToDevice(device, home.data(), size, host);
    EXPECT_EQ(*static_cast<unsigned char*>(device), 5);
    rig.link.record(rig.event, host);
    EXPECT_TRUE(rig.link.query(rig.event));

    rig.link.fill(device, 6, size, rig.one);
    rig.link.record(rig.event, rig.one);
    rig.link.wait(host, rig.event);
    rig.link.hostAccess(device, size, Access::Read);
    EXPECT_EQ(*static_cast<unsigned char*>(device), 6);
    rig.link.copyToHost(home.data(), device, size, host);
    EXPECT_EQ(home, filledWith(6));
    bool ran = false;
    rig.link.launchHost([&] { ran = true; }, host);
    EXPECT_TRUE(ran);
    rig.link.free(device, host);
    EXPECT_THROW(rig.link.hostAccess(device, 1, Access::Read), Error);
  }
}

TEST(SimLink, HostTasksMustNotCallTheLinkNorThrow) {
  expectReport(
      [](Rig& rig) { rig.link.launchHost([&] { rig.link.createEvent(0); }, rig.one); }, {"host task #", "called the link"});
  expectReport([](Rig& rig) { rig.link.launchHost([] { throw std::runtime_error("broken"); }, rig.one); }, {"threw: broken"});
  // Nor may what they own when it dies.
  expectReport(
      [](Rig& rig) {
        const std::shared_ptr<void> owned(nullptr, [&](void*) { rig.link.destroyStream(rig.two); });
        rig.link.launchHost([owned] {}, rig.one);
      },
      {"called the link"});
}

TEST(SimLink, ManyOperationsDoNotPileUp) {
  SimLink link({.seed = 1, .maxPending = 10});
  const Stream stream = link.createStream(0);
  int ran = 0;
  for (int i = 0; i < 100; ++i) {
    link.launchHost([&] { ++ran; }, stream);
  }
  EXPECT_EQ(ran, 90);
}

TEST(SimLink, RefusesToPageLockPastALimit) {
  EXPECT_FALSE(SimLink().wantsRegistration());
  Bytes host{};
  SimLink link({.wantsRegistration = true, .registrationLimit = size});
  EXPECT_TRUE(link.wantsRegistration());
  EXPECT_FALSE(link.registerHost(host.data(), size + 1));
  EXPECT_TRUE(link.registerHost(host.data(), size));
  EXPECT_FALSE(link.registerHost(host.data(), 1));
  link.unregisterHost(host.data(), size);
  EXPECT_TRUE(link.registerHost(host.data(), 1));
}

TEST(SimLink, DevicesHaveStreamsEventsAndMemoryOfTheirOwn) {
  SimLink link({.devices = 2, .deviceBytes = 256});
  EXPECT_EQ(link.deviceCount(), 2);
  const Stream second = link.createStream(1);
  link.allocate(256, {0, nullptr});
  EXPECT_THROW(link.allocate(1, {0, nullptr}), OutOfMemory);
  EXPECT_NO_THROW(link.allocate(256, second));
  EXPECT_THROW(link.record(link.createEvent(0), second), Error);
  EXPECT_THROW(link.createStream(2), Error);
  EXPECT_NO_THROW(link.wait(second, link.createEvent(0)));
}

TEST(SimLink, HostThreadsMayCallAtOnce) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    SimLink link({.seed = seed});
    const auto work = [&] {
      const Stream stream = link.createStream(0);
      const Event event = link.createEvent(0);
      Bytes home{};
      void* device = link.allocate(size, stream);
      for (unsigned char i = 0; i < 50; ++i) {
        int ran = 0;
        link.fill(device, i, size, stream);
        link.launchHost([&] { ++ran; }, stream);
        link.copyToHost(home.data(), device, size, stream);
        link.record(event, stream);
        link.synchronize(event);
        ASSERT_EQ(home, filledWith(i));
        ASSERT_EQ(ran, 1);
      }
      link.free(device, stream);
      link.destroyEvent(event);
      link.destroyStream(stream);
    };
    std::thread other(work);
    work();
    other.join();
    link.drain();
  }
}

} // namespace
} // namespace offload
