// Host tasks: their order among themselves and with copies, and that the simulation misses no lack of it.
#include "core/executor.h"

#include <stdexcept>
#include <thread>

#include "core_rig.h"
#include "sim_rig.h"

namespace offload {
namespace {

using sim_test::expectNoReport;
using sim_test::expectReport;
using sim_test::size;
using Host = sim_test::Bytes;

/// Fills or copies `size` bytes, and says so.
HostTask fill(Host& to, unsigned char value) {
  return {[&to, value] { to.fill(value); }, {{to.data(), size, Access::Write}}};
}
HostTask copy(const Host& from, Host& to) {
  return {[&] { to = from; }, {{from.data(), size, Access::Read}, {to.data(), size, Access::Write}}};
}

struct Both {
  explicit Both(sim_test::Rig& rig) : events(rig.link), executor(rig.link, events, 0) {}
  EventPool events;
  Executor executor;
};

TEST(Executor, RunsTasksInTheOrderOfTheirSubmission) {
  expectNoReport([](sim_test::Rig& rig) {
    Both both(rig);
    std::string order;
    Token last;
    for (char name = 'a'; name < 'f'; ++name) last = both.executor.submit([&order, name] { order += name; }, {});
    EXPECT_EQ(order, "");
    last.wait();
    EXPECT_EQ(order, "abcde");
  });
}

TEST(Executor, ATaskWaitsForACopyAndACopyForATask) {
  expectNoReport([](sim_test::Rig& rig) {
    Both both(rig);
    Host landed{};
    Host next{};
    Host home{};
    rig.link.fill(rig.device, 7, size, rig.one);
    rig.link.copyToHost(landed.data(), rig.device, size, rig.one);
    const Token copied = both.events.record(rig.one);
    const Token done = both.executor.submit(copy(landed, next), {&copied, 1});
    done.orderBefore(rig.two);
    rig.link.copyToDevice(rig.device, next.data(), size, rig.two);
    rig.link.copyToHost(home.data(), rig.device, size, rig.two);
    both.events.record(rig.two).wait();
    EXPECT_EQ(home, sim_test::filledWith(7));
  });
}

TEST(Executor, ATaskWaitsForATaskOfAnother) {
  expectNoReport([](sim_test::Rig& rig) {
    Both one(rig);
    Executor two(rig.link, one.events, 0);
    Host first{};
    Host second{};
    const Token filled = one.executor.submit(fill(first, 3), {});
    two.submit(copy(first, second), {&filled, 1}).wait();
    EXPECT_EQ(second, sim_test::filledWith(3));
  });
}

TEST(Executor, TheTokenSaysThatTheTaskHasReturned) {
  expectNoReport([](sim_test::Rig& rig) {
    Both both(rig);
    Host host{};
    const Token done = both.executor.submit(fill(host, 3), {});
    EXPECT_EQ(host, Host{});
    while (!done.done()) {
    }
    rig.link.hostAccess(host.data(), size, Access::Write);
    EXPECT_EQ(host, sim_test::filledWith(3));
  });
}

TEST(Executor, TasksStillRunWhenItIsGone) {
  expectNoReport([](sim_test::Rig& rig) {
    Host host{};
    EventPool events(rig.link);
    const Token done = Executor(rig.link, events, 0).submit(fill(host, 3), {});
    done.wait();
    EXPECT_EQ(host, sim_test::filledWith(3));
  });
}

TEST(Executor, ATaskThatDoesNotWaitForACopyIsReported) {
  Host landed{};
  Host next{};
  expectReport(
      [&](sim_test::Rig& rig) {
        Both both(rig);
        rig.link.copyToHost(landed.data(), rig.device, size, rig.one);
        both.executor.submit(copy(landed, next), {});
      },
      {"race: host task #", "reads 64 host bytes", "copy to host #"});
}

TEST(Executor, ACopyThatDoesNotWaitForATaskIsReported) {
  Host host{};
  expectReport(
      [&](sim_test::Rig& rig) {
        Both both(rig);
        both.executor.submit(fill(host, 3), {});
        rig.link.copyToDevice(rig.device, host.data(), size, rig.one);
      },
      {"race: copy to device #", "reads 64 host bytes", "host task #", "which writes"});
}

TEST(Executor, AHostThatDoesNotWaitForATaskIsReported) {
  Host from{};
  Host to{};
  expectReport(
      [&](sim_test::Rig& rig) {
        Both both(rig);
        both.executor.submit(copy(from, to), {});
        rig.link.hostAccess(from.data(), size, Access::Read);
        rig.link.hostAccess(from.data(), 1, Access::Write);
      },
      {"by the host writes 1 host bytes", "host task #", "which reads"});
  expectReport(
      [&](sim_test::Rig& rig) {
        Both both(rig);
        both.executor.submit(copy(from, to), {});
        rig.link.hostAccess(to.data(), size, Access::Read);
      },
      {"by the host reads 64 host bytes", "host task #", "which writes"});
}

TEST(Executor, ATaskThatTouchesDeviceMemoryIsReported) {
  expectReport(
      [](sim_test::Rig& rig) {
        Both both(rig);
        both.executor.submit({[] {}, {{rig.device, size, Access::Read}}}, {});
      },
      {"host task #", "device memory where host memory belongs"});
}

TEST(Executor, ATaskThatThrowsIsReported) {
  expectReport(
      [](sim_test::Rig& rig) {
        Both both(rig);
        both.executor.submit([] { throw std::runtime_error("broken"); }, {}).wait();
      },
      {"host task #", "threw: broken"});
}

TEST(Executor, ATaskThatCouldNotBeSubmittedIsNotRun) {
  for (std::uint64_t n = 1; n < 6; ++n) {
    SimLink sim({.seed = n});
    FaultLink link(sim);
    EventPool events(link);
    Executor executor(link, events, 0);
    const Stream stream = sim.createStream(0);
    const Token before = events.record(stream);
    int ran = 0;
    bool submitted = true;
    link.fail(n);
    try {
      executor.submit([&ran] { ++ran; }, {&before, 1}).wait();
    } catch (const Error&) {
      submitted = false; // or it could not be waited for
    }
    const bool failed = link.failures() > 0;
    link.fail(0);
    sim.drain();
    EXPECT_LE(ran, 1);
    EXPECT_TRUE(ran == 1 || !submitted);
    if (n <= 2) {
      EXPECT_EQ(ran, 0); // the order could not be given, or the task was refused
    }
    EXPECT_TRUE(failed || n > 4) << n;
    executor.submit([&ran] { ran += 10; }, {}).wait();
    EXPECT_GE(ran, 10);
  }
}

TEST(Executor, ThreadsSubmitAtOnce) {
  SimLink sim;
  EventPool events(sim);
  Executor executor(sim, events, 0);
  int ran = 0; // tasks of one Executor never run at the same time
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        bool mine = false;
        executor
            .submit(
                [&] {
                  ++ran;
                  mine = true;
                },
                {})
            .wait();
        EXPECT_TRUE(mine);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ran, 200);
}

} // namespace
} // namespace offload
