// Host work that is done later: what waits for it, which of it comes first, and what becomes of its failures.
#include "core/host_jobs.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;
using When = HostJobs::When;

constexpr std::size_t kBytes = 4096;

CoreOptions doneBy(When when, std::size_t budget = 0) {
  CoreOptions options;
  options.cache.hostJobs = when;
  options.cache.budgetBytes = budget;
  return options;
}

/// Blocks, and jobs that write down when they are done.
class Jobs {
 public:
  explicit Jobs(When when, std::size_t count = 4, std::size_t budget = 0) : rig(doneBy(when, budget)) {
    for (std::size_t k = 0; k < count; ++k) blocks.push_back(rig.newBlock(pattern(k, kBytes)));
  }
  /// Gives a Block another value, from its own.
  void add(std::size_t k, unsigned char number) {
    Block& block = *blocks[k];
    rig.cache.runLater({{&block, Access::Write}}, [this, &block, k, number] {
      auto* const bytes = static_cast<unsigned char*>(block.data);
      rig.sim.hostAccess(bytes, kBytes, Access::Write);
      for (std::size_t at = 0; at < kBytes; ++at) bytes[at] = static_cast<unsigned char>(bytes[at] + number);
      const std::lock_guard lock(mutex);
      done.push_back(k);
    });
  }
  static Bytes added(std::size_t k, unsigned char number) {
    Bytes value = pattern(k, kBytes);
    for (auto& byte : value) byte = static_cast<unsigned char>(byte + number);
    return value;
  }
  Bytes onDevice(std::size_t k) {
    const Pin pin = rig.cache.fetch(*blocks[k], {0, kBytes}, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), kBytes);
    rig.sim.drain();
    return *seen;
  }
  std::vector<std::size_t> sofar() {
    const std::lock_guard lock(mutex);
    return done;
  }

  Rig rig;
  Stream stream = rig.sim.createStream(0);
  std::vector<Rig::BlockPtr> blocks;
  std::mutex mutex;
  std::vector<std::size_t> done;
};

class HostJobsOfEachKind : public testing::TestWithParam<When> {};
INSTANTIATE_TEST_SUITE_P(
    Whenever, HostJobsOfEachKind, testing::Values(When::AtOnce, When::Wanted, When::Soon), [](const auto& info) {
      return info.param == When::AtOnce ? "AtOnce" : info.param == When::Wanted ? "Wanted" : "Soon";
    });

TEST_P(HostJobsOfEachKind, WhoeverWantsTheBytesGetsTheNewOnes) {
  Jobs jobs(GetParam(), 5, 2 * kBytes);
  EXPECT_EQ(jobs.onDevice(0), pattern(0, kBytes));
  for (std::size_t k = 0; k < 5; ++k) jobs.add(k, 7);
  EXPECT_EQ(jobs.onDevice(0), Jobs::added(0, 7)) << "not the copy that there was";
  EXPECT_EQ(jobs.rig.read(*jobs.blocks[1]), Jobs::added(1, 7));
  jobs.add(2, 3);
  jobs.rig.cache.adopt(*jobs.blocks[3], jobs.rig.newResult(jobs.stream, pattern(9, kBytes)), jobs.stream);
  jobs.rig.write(*jobs.blocks[4], pattern(11, 8), 16);
  jobs.rig.cache.drain(false);
  EXPECT_EQ(jobs.onDevice(2), Jobs::added(2, 10));
  EXPECT_EQ(jobs.rig.read(*jobs.blocks[3]), pattern(9, kBytes)) << "written after the job";
  Bytes partly = Jobs::added(4, 7);
  const Bytes part = pattern(11, 8);
  std::copy(part.begin(), part.end(), partly.begin() + 16);
  EXPECT_EQ(jobs.onDevice(4), partly);
}

TEST_P(HostJobsOfEachKind, AJobReadsWhatIsNewerOnTheDevice) {
  Jobs jobs(GetParam(), 2, 4 * kBytes);
  Block& to = *jobs.blocks[0];
  Block& from = *jobs.blocks[1];
  jobs.rig.cache.adopt(from, jobs.rig.newResult(jobs.stream, pattern(9, kBytes)), jobs.stream);
  jobs.rig.cache.runLater({{&to, Access::Write}, {&from, Access::Read}}, [&] {
    jobs.rig.sim.hostAccess(from.data, kBytes, Access::Read);
    std::memcpy(to.data, from.data, kBytes);
  });
  jobs.rig.cache.adopt(from, jobs.rig.newResult(jobs.stream, pattern(10, kBytes)), jobs.stream);
  EXPECT_EQ(jobs.onDevice(0), pattern(9, kBytes));
  EXPECT_EQ(jobs.onDevice(1), pattern(10, kBytes));
}

TEST_P(HostJobsOfEachKind, AFailureIsToldOnceAndAllGoesOn) {
  Jobs jobs(GetParam());
  try {
    jobs.rig.cache.runLater({{jobs.blocks[0].get(), Access::Write}}, [] { throw std::runtime_error("no room"); });
    EXPECT_NE(GetParam(), When::AtOnce) << "told later";
    jobs.rig.cache.drain(false);
    FAIL() << "nothing was told";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "no room");
  }
  jobs.add(0, 1);
  EXPECT_EQ(jobs.onDevice(0), Jobs::added(0, 1));
}

TEST_P(HostJobsOfEachKind, WhoHoldsALeaseSeesItAtOnce) {
  Jobs jobs(GetParam());
  jobs.add(0, 1);
  const HostLease lease = jobs.rig.cache.lease(*jobs.blocks[0], Access::Read);
  jobs.add(0, 1);
  EXPECT_EQ(std::memcmp(jobs.blocks[0]->data, Jobs::added(0, 2).data(), kBytes), 0);
  jobs.rig.cache.runLater({{jobs.blocks[1].get(), Access::Write}, {jobs.blocks[0].get(), Access::Read}}, [&] {
    std::memcpy(jobs.blocks[1]->data, jobs.blocks[0]->data, kBytes);
  });
  EXPECT_EQ(jobs.rig.cache.hostJobStats().pending, 0U) << "he may write to what it reads";
}

TEST_P(HostJobsOfEachKind, WhatIsLeftIsDoneBeforeTheCacheGoes) {
  std::atomic<int> done = 0;
  {
    Jobs jobs(GetParam());
    for (const auto& block : jobs.blocks) jobs.rig.cache.runLater({{block.get(), Access::Write}}, [&done] { ++done; });
    jobs.rig.cache.drain(false);
    EXPECT_EQ(done, 4);
    jobs.rig.cache.runLater({{jobs.blocks[0].get(), Access::Read}}, [&done] { ++done; });
    jobs.rig.cache.drain(true);
  }
  EXPECT_EQ(done, 5);
}

TEST_P(HostJobsOfEachKind, WhatAJobHoldsGoesAfterIt) {
  Jobs jobs(GetParam());
  auto held = std::make_shared<int>(1);
  jobs.rig.cache.runLater({{jobs.blocks[0].get(), Access::Write}}, [held] {});
  jobs.rig.cache.drain(false);
  EXPECT_EQ(held.use_count(), 1);
}

TEST_P(HostJobsOfEachKind, ABlockThatAJobAloneHoldsGoesWithIt) {
  Jobs jobs(GetParam());
  auto last = std::make_shared<Rig::BlockPtr>(std::move(jobs.blocks[1]));
  Block* const block = last->get();
  jobs.rig.cache.runLater(
      {{jobs.blocks[0].get(), Access::Write}, {block, Access::Read}}, [held = std::move(last)] { EXPECT_TRUE(*held); });
  EXPECT_EQ(jobs.rig.read(*jobs.blocks[0]), pattern(0, kBytes));
}

TEST_P(HostJobsOfEachKind, ThreadsThatClaimTheSameBlocksDoNotWaitForEachOther) {
  Jobs jobs(GetParam(), 3);
  std::vector<std::thread> threads;
  std::atomic<int> sum = 0;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 50; ++round) {
        std::vector<Residency::Claim> claims;
        for (int k = 0; k < 3; ++k)
          claims.push_back({jobs.blocks[static_cast<std::size_t>((k + thread) % 3)].get(), Access::Write});
        jobs.rig.cache.runLater(claims, [&sum] { ++sum; });
      }
    });
  }
  for (auto& thread : threads) thread.join();
  jobs.rig.cache.drain(false);
  EXPECT_EQ(sum, 200);
}

TEST_P(HostJobsOfEachKind, TheVersionThatIsAwaitedIsThatOfTheHostsBytes) {
  Jobs jobs(GetParam(), 2, 4 * kBytes);
  Block& block = *jobs.blocks[0];
  const auto before = jobs.rig.cache.awaitVersion(block);
  ASSERT_TRUE(before);
  jobs.add(1, 1);
  jobs.add(0, 1);
  EXPECT_EQ(jobs.rig.cache.awaitVersion(block), *before + 1) << "once the job is done";
  EXPECT_EQ(std::ranges::count(jobs.sofar(), 0U), 1);
  std::uint64_t read = 0;
  jobs.rig.cache.runLater({{&block, Access::Read}}, [&] { read = jobs.rig.cache.versionOf(block); });
  EXPECT_EQ(jobs.rig.cache.awaitVersion(block), *before + 1) << "nothing was written";
  EXPECT_EQ(read, *before + 1);
  jobs.rig.cache.adopt(block, jobs.rig.newResult(jobs.stream, pattern(9, kBytes)), jobs.stream);
  EXPECT_EQ(jobs.rig.cache.awaitVersion(block), std::nullopt) << "the newest bytes are the device's alone";
  EXPECT_EQ(jobs.rig.read(block), pattern(9, kBytes));
  EXPECT_EQ(jobs.rig.cache.awaitVersion(block), *before + 2);
  jobs.rig.cache.finishJobs(); // the Blocks go now
}

TEST(HostJobsWhenWanted, AFetchWaitsForItsOwnUpdateAlone) {
  Jobs jobs(When::Wanted);
  for (std::size_t k = 0; k < 4; ++k) jobs.add(k, 1);
  EXPECT_TRUE(jobs.sofar().empty());
  EXPECT_EQ(jobs.onDevice(2), Jobs::added(2, 1));
  EXPECT_EQ(jobs.sofar(), std::vector<std::size_t>{2});
  jobs.rig.cache.drain(false);
  EXPECT_EQ(jobs.sofar(), (std::vector<std::size_t>{2, 0, 1, 3}));
}

TEST(HostJobsWhenWanted, JobsOnABlockAreDoneInOrderWhenItIsWanted) {
  Jobs jobs(When::Wanted);
  std::string order;
  const auto submit = [&](char name, std::initializer_list<std::size_t> of) {
    std::vector<Residency::Claim> claims;
    for (const std::size_t k : of) claims.push_back({jobs.blocks[k].get(), k == *of.begin() ? Access::Write : Access::Read});
    jobs.rig.cache.runLater(claims, [&order, name] { order += name; });
  };
  submit('a', {0});
  submit('b', {3});
  submit('c', {1, 0});
  submit('d', {0});
  submit('e', {2, 1});
  EXPECT_EQ(jobs.rig.cache.hostJobStats().pending, 5U) << "none has waited for another";
  (void)jobs.onDevice(2);
  EXPECT_EQ(order, "ace") << "what the last needs, and no more";
  (void)jobs.rig.read(*jobs.blocks[0]);
  EXPECT_EQ(order, "aced");
  jobs.rig.cache.drain(false);
  EXPECT_EQ(order, "acedb");
}

/// Tells that a thread is about to wait for host work.
struct TellsOfWaits final : Observer {
  std::unique_ptr<Span> begin(const Observation& observation) noexcept override {
    if (observation.activity == Activity::Wait) ++waits;
    return nullptr;
  }
  std::atomic<int> waits = 0;
};

// Who waits for work that another thread does at once, and that has no place among the jobs, finds a job when that is done.
TEST(HostJobsWhenWanted, AJobThatIsSubmittedWhileSomebodyWaitsIsWantedToo) {
  TellsOfWaits observer;
  CoreOptions options = doneBy(When::Wanted);
  options.cache.observer = &observer;
  Rig rig(options);
  const auto block = rig.newBlock(pattern(0, kBytes));
  std::promise<void> begun;
  std::promise<void> goOn;
  HostLease lease = rig.cache.lease(*block, Access::Read);
  std::thread atOnce([&] {
    rig.cache.runLater({{block.get(), Access::Write}}, [&] {
      begun.set_value();
      goOn.get_future().wait();
    });
  });
  begun.get_future().wait();
  lease = {};
  std::atomic<bool> second = false;
  std::atomic<bool> seen = false;
  auto waiting = std::async(std::launch::async, [&] {
    (void)rig.cache.awaitVersion(*block);
    seen = second.load();
  });
  while (observer.waits == 0 && waiting.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20)); // it sleeps by now
  rig.cache.runLater({{block.get(), Access::Write}}, [&] { second = true; });
  EXPECT_FALSE(second);
  goOn.set_value();
  EXPECT_EQ(waiting.wait_for(std::chrono::seconds(10)), std::future_status::ready) << "nobody does the job";
  rig.cache.finishJobs();
  waiting.get();
  atOnce.join();
  EXPECT_TRUE(seen);
}

TEST(HostJobsWhenWanted, JobsThatNobodyWantsDoNotPileUp) {
  Jobs jobs(When::Wanted, 1);
  for (int k = 0; k < 5000; ++k) jobs.add(0, 1);
  EXPECT_LE(jobs.rig.cache.hostJobStats().pending, 4096U);
  EXPECT_EQ(jobs.rig.read(*jobs.blocks[0]), Jobs::added(0, static_cast<unsigned char>(5000)));
}

TEST(HostJobsWhenWanted, WhatNobodyElseKeepsDoesNotPileUp) {
  for (const bool kept : {false, true}) {
    Jobs jobs(When::Wanted, 1);
    std::vector<std::unique_ptr<Block>> large; // of 16 MiB, as far as anybody reads
    std::size_t most = 0;
    for (int k = 0; k < 200; ++k) {
      large.push_back(std::make_unique<Block>(nullptr, std::size_t{16} << 20, BlockKind::Foreign, Born::Host, 0));
      large.back()->owners = kept ? 2 : 1; // the job's, and somebody's
      jobs.rig.cache.runLater({{jobs.blocks[0].get(), Access::Write}, {large.back().get(), Access::Read}}, [] {});
      most = std::max(most, jobs.rig.cache.hostJobStats().pending);
    }
    if (kept) {
      EXPECT_EQ(most, 200U);
    } else {
      EXPECT_LE(most, 140U) << "2 GiB and a few";
    }
    jobs.rig.cache.drain(false);
    for (const auto& block : large) jobs.rig.cache.forget(*block);
  }
}

TEST(HostJobsWhenWanted, NothingThatIsToBeWrittenIsCopiedAhead) {
  CoreOptions options = doneBy(When::Wanted);
  options.cache.ringBytes = 4 * kBytes;
  Rig rig(options);
  const Stream stream = rig.sim.createStream(0);
  std::vector<Rig::BlockPtr> blocks;
  for (std::size_t k = 0; k < 8; ++k) blocks.push_back(rig.newBlock(pattern(k, kBytes)));
  for (unsigned char step = 0; step < 12; ++step) {
    for (std::size_t k = 0; k < 8; ++k) {
      const Pin pin = rig.cache.fetch(*blocks[k], {0, kBytes}, stream);
      const auto seen = rig.readOnDevice(stream, pin.data(), kBytes);
      rig.sim.drain();
      EXPECT_EQ(*seen, Jobs::added(k, step));
    }
    for (std::size_t k = 8; k-- > 0;) {
      Block& block = *blocks[k];
      rig.cache.runLater({{&block, Access::Write}}, [&block] {
        auto* const bytes = static_cast<unsigned char*>(block.data);
        for (std::size_t at = 0; at < kBytes; ++at) ++bytes[at];
      });
    }
  }
  rig.cache.drain(false); // the Blocks go now
  EXPECT_GT(rig.cache.stats(0).prefetches, 0U) << "of what has been written by then";
}

// ---- the thread

HostJobs::Job job(std::function<void()> run, std::vector<Token> after = {}, std::vector<const Block*> blocks = {}) {
  return {std::move(after), std::move(blocks), std::move(run)};
}

TEST(HostJobsSoon, WhatIsWantedComesNextAndThenWhatWasSubmittedFirst) {
  Jobs of(When::AtOnce);
  HostJobs jobs(When::Soon);
  std::promise<void> begun;
  std::promise<void> goOn;
  std::string order;
  (void)jobs.submit(job([&] {
    begun.set_value();
    goOn.get_future().wait();
  }));
  begun.get_future().wait();
  for (const char name : {'a', 'b', 'c', 'd'}) {
    (void)jobs.submit(job([&order, name] { order += name; }, {}, {of.blocks[static_cast<std::size_t>(name - 'a')].get()}));
  }
  (void)jobs.want(*of.blocks[2]);
  goOn.set_value();
  jobs.drain();
  EXPECT_EQ(order, "cabd");
}

TEST(HostJobsSoon, WhatIsWantedComesAfterWhatItNeeds) {
  Jobs of(When::AtOnce);
  HostJobs jobs(When::Soon);
  std::promise<void> begun;
  std::promise<void> goOn;
  std::string order;
  const auto submit = [&](char name, std::initializer_list<std::size_t> blocks) {
    std::vector<const Block*> claimed;
    for (const std::size_t k : blocks) claimed.push_back(of.blocks[k].get());
    (void)jobs.submit(job([&order, name] { order += name; }, {}, claimed));
  };
  (void)jobs.submit(job(
      [&] {
        begun.set_value();
        goOn.get_future().wait();
      },
      {}, {of.blocks[0].get()}));
  begun.get_future().wait();
  submit('a', {3});
  submit('b', {0});
  submit('c', {0, 1});
  submit('d', {1, 2});
  submit('e', {0});
  EXPECT_FALSE(jobs.want(*of.blocks[2])) << "the thread does it";
  goOn.set_value();
  jobs.drain();
  EXPECT_EQ(order, "bcdae");
}

TEST(HostJobsSoon, WhatNothingHoldsUpGoesBeforeWhatIsHeldUp) {
  Jobs of(When::AtOnce);
  EventPool events(of.rig.sim);
  std::atomic<bool> open = false;
  of.rig.sim.launch(of.stream, [&open] { open = true; }, {}, {});
  const Token late = events.record(of.stream);
  std::string order;
  {
    HostJobs jobs(When::Soon);
    std::promise<void> begun;
    std::promise<void> goOn;
    (void)jobs.submit(job([&] {
      begun.set_value();
      goOn.get_future().wait();
    }));
    begun.get_future().wait();
    (void)jobs.submit(job(
        [&] {
          late.wait();
          order += open ? "held up, " : "too early, ";
        },
        {late}, {of.blocks[0].get()}));
    (void)jobs.want(*of.blocks[0]);
    (void)jobs.submit(job([&] { order += "free, "; }));
    (void)jobs.submit(job([&] { order += "free too, "; }));
    goOn.set_value();
    jobs.drain();
  }
  EXPECT_EQ(order.substr(0, 5), "free,") << "though the other one is wanted";
  EXPECT_EQ(order.find("too early"), std::string::npos);
}

// Another thread may go on submitting for as long as the program runs.
TEST(HostJobsSoon, DrainWaitsForNoMoreThanWasThere) {
  HostJobs jobs(When::Soon);
  std::atomic<bool> stop = false;
  std::function<void()> again = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!stop) (void)jobs.submit(job(again));
  };
  (void)jobs.submit(job(again));
  auto drained = std::async(std::launch::async, [&jobs] { jobs.drain(); });
  EXPECT_EQ(drained.wait_for(std::chrono::seconds(2)), std::future_status::ready);
  stop = true;
}

TEST(HostJobs, WorkOnNothingIsDoneAtOnce) {
  for (const When when : {When::AtOnce, When::Wanted, When::Soon}) {
    Jobs jobs(when);
    bool done = false;
    jobs.rig.cache.runLater({}, [&done] { done = true; });
    EXPECT_TRUE(done);
  }
}

} // namespace
} // namespace offload
