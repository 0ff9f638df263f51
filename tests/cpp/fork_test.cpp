// A process that forks while its other threads use what a child goes on using.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

#include "core/fork_mutex.h"
#include "core/host_accounts.h"
#include "core_rig.h"
#include "test_file.h"

namespace offload {
namespace {

using namespace core_test;
using namespace std::chrono_literals;

/// The status of a child; that of a killed one where it has not ended by then.
int endsIn(pid_t child, std::chrono::seconds limit) {
  int status = 0;
  const auto end = std::chrono::steady_clock::now() + limit;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) kill(child, SIGKILL);
    std::this_thread::sleep_for(100us);
  }
  return status;
}

/// Forks again and again while two threads do `work`; each child does it once, and ends.
void forkBeside(const std::function<void()>& work, int forks = 200) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int k = 0; k < 2; ++k) {
    threads.emplace_back([&] {
      while (!stop) {
        work();
      }
    });
  }
  int status = 0;
  for (int k = 0; k < forks && status == 0; ++k) {
    const pid_t child = fork();
    if (child == 0) {
      work();
      _exit(0);
    }
    status = endsIn(child, 10s);
    EXPECT_EQ(status, 0) << "child " << k << (status == SIGKILL ? " waits for ever" : "");
  }
  stop = true;
  for (auto& thread : threads) {
    thread.join();
  }
}

TEST(Fork, AChildAllocates) {
  Arena arena(nullptr);
  forkBeside([&arena] {
    for (const std::size_t bytes : {100U, 3000U, 30000U}) {
      arena.free(arena.allocate(bytes).data, {});
    }
  });
}

TEST(Fork, AChildCountsBlocks) {
  HostAccounts accounts;
  forkBeside([&accounts] {
    Block block(nullptr, 100, BlockKind::Pageable, Born::Host, 0);
    accounts.open(block);
    accounts.claim(block, Purpose::Parameter);
    accounts.close(block);
  });
  EXPECT_EQ(accounts.stats().all.bytes, 0U);
}

TEST(Fork, AChildWritesToWhatIsAFiles) {
  const TestFile onDisk(std::vector<unsigned char>(1 << 16, 7));
  forkBeside([path = onDisk.path()] {
    FileBytes bytes(std::make_shared<File>(path), 100, 5000);
    bytes.prepare(Access::Write);
    bytes.data()[1] = std::byte{1};
  });
}

// In a process of its own, as ctest runs it: each of its children is one that has used nothing yet.
TEST(Fork, AChildOfOneThatIsMakingItsFirstMutex) {
  constexpr int kMoments = 50;
  for (int k = 0; k < 8 * kMoments; ++k) {
    const pid_t fresh = fork();
    if (fresh == 0) {
      std::thread([] { const ForkMutex mutex(ForkRank::Other); }).detach();
      const auto moment = std::chrono::steady_clock::now() + k % kMoments * 2us;
      while (std::chrono::steady_clock::now() < moment) {
      }
      const pid_t child = fork();
      if (child == 0) {
        const ForkMutex mutex(ForkRank::Other);
        _exit(0);
      }
      _exit(endsIn(child, 10s) == 0 ? 0 : 1);
    }
    int status = 0;
    waitpid(fresh, &status, 0);
    ASSERT_EQ(status, 0) << "child " << k << " waits for ever";
  }
}

} // namespace
} // namespace offload
