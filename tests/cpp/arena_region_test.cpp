// Memory as the system sees it: pages, huge pages, forks, limits of containers.
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "arena_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// Bytes of huge pages within the mapping that holds `address`.
std::size_t hugeBytes(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    std::istringstream words(line);
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      here = begin <= reinterpret_cast<std::uintptr_t>(address) && reinterpret_cast<std::uintptr_t>(address) < end;
    } else if (here && line.starts_with("AnonHugePages:")) {
      return std::stoull(line.substr(line.find(':') + 1)) << 10;
    }
  }
  return 0;
}

bool systemGivesHugePages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string setting;
  return std::getline(file, setting) && setting.find("[never]") == std::string::npos;
}

TEST(HostRegion, HasWholePagesAndNoMore) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, 2 * kMiB - 1, 2 * kMiB, 5 * kMiB + 1}) {
    const HostRegion region = HostRegion::map(bytes);
    ASSERT_TRUE(region);
    EXPECT_EQ(region.bytes(), wholePages(bytes));
    EXPECT_LT(region.bytes() - bytes, wholePages(1));
    EXPECT_EQ(residentPages(region.data(), bytes), 0);
    if (bytes >= 2 * kMiB) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % (2 * kMiB), 0U);
    }
  }
  EXPECT_FALSE(HostRegion::map(SIZE_MAX));
  EXPECT_FALSE(HostRegion::map(std::size_t{1} << 60));
}

TEST(HostRegion, PopulatesEveryPageOnAnyNumberOfThreads) {
  for (const std::size_t bytes : {std::size_t{4096}, 16 * kMiB, 100 * kMiB + 5}) {
    for (const std::size_t threads : {1U, 3U, 16U}) {
      HostRegion region = HostRegion::map(bytes);
      ASSERT_TRUE(region.populate(threads));
      EXPECT_EQ(residentPages(region.data(), bytes), static_cast<std::ptrdiff_t>(region.bytes() / wholePages(1)));
      EXPECT_EQ(region.data()[bytes - 1], 0);
      char* const data = region.data();
      region = HostRegion();
      EXPECT_EQ(residentPages(data, bytes), -1);
    }
  }
}

TEST(HostRegion, HasHugePagesWhereTheSystemGivesThem) {
  if (!systemGivesHugePages()) {
    GTEST_SKIP() << "this system gives none";
  }
  const HostRegion region = HostRegion::map(64 * kMiB + 4096);
  ASSERT_TRUE(region.populate());
  // Some may be refused where memory is fragmented.
  EXPECT_GE(hugeBytes(region.data()), 32 * kMiB);
}

TEST(HostRegion, IsNotInAForkedChild) {
  ArenaRig rig;
  const HostRange range = rig.arena.allocate(1 << 16);
  ASSERT_TRUE(range.pinned);
  const HostRegion other = HostRegion::map(1 << 16);
  const pid_t child = fork();
  if (child == 0) {
    _exit((residentPages(range.data, range.bytes) == -1 ? 1 : 0) + (residentPages(other.data(), 1) == -1 ? 2 : 0));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

TEST(HostRegion, TrimGivesMemoryBackToTheSystem) {
  ArenaOptions options;
  options.memoryLimits = [] { return MemoryLimits{}; };
  ArenaRig rig(options);
  const HostRange range = rig.arena.allocate(40 * kMiB + 1);
  ASSERT_TRUE(range.pinned);
  EXPECT_EQ(residentPages(range.data, range.bytes), static_cast<std::ptrdiff_t>(wholePages(range.bytes) / wholePages(1)));
  rig.arena.free(range.data, {});
  EXPECT_GT(residentPages(range.data, range.bytes), 0); // cached
  EXPECT_EQ(rig.arena.trim(), wholePages(40 * kMiB + 1));
  EXPECT_EQ(residentPages(range.data, range.bytes), -1);
  EXPECT_EQ(rig.arena.stats().reserved, 0U);
  EXPECT_EQ(rig.link.lockedBytes, 0U);
}

/// A file system's part that the kernel shows of memory, under a folder.
class FakeSystem : public testing::Test {
 protected:
  FakeSystem() : root(testing::TempDir() + "/memory_limits_" + std::to_string(getpid())) {
    write("/proc/meminfo", "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    700 kB\nSwapTotal: 300 kB\n");
  }
  ~FakeSystem() override {
    std::filesystem::remove_all(root);
  }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  void expect(std::size_t total, std::size_t available, std::size_t swap = 300 << 10) const {
    const MemoryLimits memory = readMemoryLimits(root);
    EXPECT_EQ(memory.swap, swap);
    EXPECT_EQ(memory.total, total);
    EXPECT_EQ(memory.available, available);
  }
  const std::string root;
};

TEST_F(FakeSystem, WithoutGroupsTheMachineLimits) {
  expect(1000 << 10, 700 << 10);
}

TEST_F(FakeSystem, WithoutAnythingNothingLimits) {
  std::filesystem::remove_all(root);
  expect(SIZE_MAX, SIZE_MAX, SIZE_MAX);
}

TEST_F(FakeSystem, EveryGroupOfTheSecondVersionLimits) {
  write("/proc/self/cgroup", "0::/outer/inner\n");
  write("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n");
  write("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
  write("/sys/fs/cgroup/outer/inner/memory.high", "500000\n");
  write("/sys/fs/cgroup/outer/inner/memory.current", "300000\n");
  write("/sys/fs/cgroup/outer/inner/memory.stat", "anon 1\nactive_file 50000\ninactive_file 40000\n");
  expect(500000, 290000);
  write("/sys/fs/cgroup/outer/memory.max", "400000\n");
  write("/sys/fs/cgroup/outer/memory.current", "350000\n");
  expect(400000, 50000);
  write("/sys/fs/cgroup/outer/memory.swap.max", "20000\n");
  write("/sys/fs/cgroup/outer/inner/memory.swap.max", "max\n");
  expect(400000, 50000, 20000);
}

TEST_F(FakeSystem, AContainerShowsItsOwnGroupAtTheMount) {
  write("/sys/fs/cgroup/memory.max", "600000\n");
  write("/sys/fs/cgroup/memory.current", "100000\n");
  // With a namespace of its own, and without one.
  for (const char* group : {"0::/\n", "0::/docker/abc\n", "0::/../other\n"}) {
    write("/proc/self/cgroup", group);
    write("/proc/self/mountinfo", "30 20 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
    expect(600000, 500000);
  }
}

TEST_F(FakeSystem, AnotherGroupsMountIsReadAsItIs) {
  write("/proc/self/cgroup", "0::/docker/abcd\n");
  write("/proc/self/mountinfo", "30 20 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
  write("/sys/fs/cgroup/memory.max", "600000\n");
  expect(600000, 600000);
}

TEST_F(FakeSystem, TheFirstVersionLimits) {
  write("/proc/self/cgroup", "5:cpuset:/x\n4:cpu,memory:/job\n0::/\n");
  write(
      "/proc/self/mountinfo",
      "30 20 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup "
      "rw,memory\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "800000\n");
  write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "500000\n");
  write("/sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 100000\ninactive_file 1\n");
  expect(800000, 400000);
  write("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/job/memory.memsw.limit_in_bytes", "830000\n"); // memory and swap
  expect(800000, 400000, 30000);
}

TEST(MemoryLimits, OfThisMachineIsPlausible) {
  const MemoryLimits memory = readMemoryLimits();
  EXPECT_GT(memory.available, 0U);
  EXPECT_LE(memory.available, memory.total);
  EXPECT_LT(memory.total, SIZE_MAX);
}

} // namespace
} // namespace offload
