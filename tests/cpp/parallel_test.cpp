#include "core/parallel.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace offload {
namespace {

// Sums 1 ... last on some threads; every piece is taken once, whoever takes it.
std::size_t sum(std::size_t threads, std::size_t last) {
  std::atomic<std::size_t> next{1};
  std::atomic<std::size_t> total{0};
  inParallel(threads, [&] {
    for (std::size_t i = next++; i <= last; i = next++) total += i;
  });
  return total;
}

TEST(Parallel, DoesEveryPieceOnceOnAnyNumberOfThreads) {
  for (const std::size_t threads : {0U, 1U, 2U, 5U, 16U}) {
    for (int repeat = 0; repeat < 50; ++repeat) ASSERT_EQ(sum(threads, 1000), 500500U) << threads;
  }
}

TEST(Parallel, RunsOnAsManyThreadsAsAskedFor) {
  for (const std::size_t threads : {1U, 2U, 4U}) {
    // Ends only when all have come.
    std::latch all(static_cast<std::ptrdiff_t>(threads));
    std::mutex mutex;
    std::set<std::thread::id> ids;
    inParallel(threads, [&] {
      all.arrive_and_wait();
      const std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    });
    EXPECT_EQ(ids.size(), threads);
    EXPECT_TRUE(ids.contains(std::this_thread::get_id()));
  }
}

TEST(Parallel, ReturnsAfterAllCallsHaveReturned) {
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::atomic<int> inside{0};
    std::atomic<int> calls{0};
    inParallel(4, [&] {
      ++inside;
      ++calls;
      std::this_thread::yield();
      --inside;
    });
    ASSERT_EQ(inside, 0);
    ASSERT_GE(calls, 1);
    ASSERT_LE(calls, 4);
  }
}

TEST(Parallel, ServesSeveralThreadsAtOnceAndNestedWork) {
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([] {
      for (int repeat = 0; repeat < 30; ++repeat) EXPECT_EQ(sum(4, 300), 45150U);
    });
  }
  for (auto& caller : callers) caller.join();
  std::atomic<int> outer{0};
  inParallel(3, [&] {
    ++outer;
    EXPECT_EQ(sum(3, 100), 5050U);
  });
  EXPECT_GE(outer, 1);
}

// The thread sanitizer ends a forked child that starts threads, and in that of the address sanitizer locks of its allocator may be
// held for ever.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(Parallel, WorksInAForkedChildOfAProcessThatHasThreads) {
  EXPECT_EQ(sum(4, 1000), 500500U);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    std::latch both(2); // threads of its own, too
    inParallel(2, [&] { both.arrive_and_wait(); });
    _exit(sum(4, 1000) == 500500 ? 5 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 5);
}
#endif

} // namespace
} // namespace offload
