// Which CPUs a memory node has, as the kernel tells it, and that host memory is touched on them.
#include "core/memory_node.h"
#include "core/host_region.h"

#include <gtest/gtest.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <vector>

namespace {

/// What a test plays in the system's place: a process that may use every CPU that a set holds, and what its threads are kept to.
struct PlayedCpus {
  PlayedCpus() {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &allowed);
  }
  cpu_set_t allowed{};
  std::mutex mutex;
  std::map<long, std::vector<cpu_set_t>> kept; // by thread, in their order
};
std::atomic<PlayedCpus*> played{nullptr};

} // namespace

// Core is part of this program, so its calls come here before they come to the C library.
extern "C" int sched_getaffinity(pid_t thread, std::size_t bytes, cpu_set_t* cpus) noexcept {
  if (const PlayedCpus* const now = played; now != nullptr) {
    std::memcpy(cpus, &now->allowed, std::min(bytes, sizeof(now->allowed)));
    return 0;
  }
  return syscall(SYS_sched_getaffinity, thread, bytes, cpus) < 0 ? -1 : 0;
}

extern "C" int sched_setaffinity(pid_t thread, std::size_t bytes, const cpu_set_t* cpus) noexcept {
  if (PlayedCpus* const now = played; now != nullptr) {
    const std::lock_guard lock(now->mutex);
    now->kept[syscall(SYS_gettid)].push_back(*cpus);
    return 0;
  }
  return static_cast<int>(syscall(SYS_sched_setaffinity, thread, bytes, cpus));
}

namespace offload {
namespace {

using Cpus = std::vector<int>;

cpu_set_t setOf(const Cpus& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  return set;
}

Cpus range(int first, int last) {
  Cpus cpus;
  for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  return cpus;
}

/// A machine of memory nodes, in a folder of files as the kernel's.
class MemoryNode : public testing::Test {
 protected:
  MemoryNode() : root_(testing::TempDir() + "/memory_node_" + std::to_string(getpid())) {}
  ~MemoryNode() override {
    std::filesystem::remove_all(root_);
  }
  void add(unsigned node, const std::string& list) const {
    const std::string folder = root_ + "/sys/devices/system/node/node" + std::to_string(node);
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/cpulist") << list;
  }
  Cpus near(unsigned node, const Cpus& allowed) const {
    const cpu_set_t set = cpusOfNode(node, setOf(allowed), root_);
    Cpus cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
    return cpus;
  }

 private:
  const std::string root_;
};

TEST_F(MemoryNode, HasItsOwnCpusOfThoseThatAreAllowed) {
  add(0, "0-3,8-11\n");
  add(1, "4-7,12-15\n");
  EXPECT_EQ(near(0, range(0, 15)), (Cpus{0, 1, 2, 3, 8, 9, 10, 11}));
  EXPECT_EQ(near(1, range(0, 15)), (Cpus{4, 5, 6, 7, 12, 13, 14, 15}));
  EXPECT_EQ(near(1, {1, 3, 5, 13, 14}), (Cpus{5, 13, 14}));
}

TEST_F(MemoryNode, ReadsListsOfEveryForm) {
  const struct {
    const char* list;
    Cpus cpus;
  } lists[] = {
      {"5\n", {5}},
      {"0,2,4\n", {0, 2, 4}},
      {"1-2,7,10-11", {1, 2, 7, 10, 11}},
      {"30-1000000\n", range(30, 40)}, // more than a set holds
      {"3-1,6\n", {6}},
      {"2,x,4\n", {2}}, // as far as it can be read
  };
  for (const auto& [list, cpus] : lists) {
    add(0, list);
    EXPECT_EQ(near(0, range(0, 40)), cpus) << list;
  }
}

TEST_F(MemoryNode, WhereItCantBeToldAllThatAreAllowedAreNear) {
  const Cpus allowed{1, 4, 6};
  EXPECT_EQ(near(0, allowed), allowed); // no nodes at all
  add(0, "0-3\n");
  add(1, "4-7\n");
  EXPECT_EQ(near(2, allowed), allowed); // no such node
  EXPECT_EQ(near(0, {5, 6}), (Cpus{5, 6})); // bound to another node
  for (const char* list : {"\n", "", "none\n"}) {
    add(2, list); // of memory alone
    EXPECT_EQ(near(2, allowed), allowed) << list;
  }
  EXPECT_EQ(near(1, {}), Cpus{});
}

TEST_F(MemoryNode, OfThisMachineHasSomeOfWhatThisThreadMayUse) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  const cpu_set_t nearby = cpusOfNode(0, allowed);
  cpu_set_t both;
  CPU_AND(&both, &nearby, &allowed);
  EXPECT_TRUE(CPU_EQUAL(&both, &nearby));
  EXPECT_GT(CPU_COUNT(&nearby), 0);
}

// What a thread touches first is on its node. So whoever helps is on the caller's while it does, and afterwards where it was; the caller
// stays where it is.
TEST(MemoryOfANode, ThreadsThatTouchARegionAreKeptToTheCpusOfTheCallersNode) {
  const cpu_set_t allowed = PlayedCpus().allowed;
  std::vector<cpu_set_t> nodes;
  for (unsigned node = 0; node < 64; ++node) {
    const cpu_set_t nearby = cpusOfNode(node, allowed);
    if (!CPU_EQUAL(&nearby, &allowed) && CPU_COUNT(&nearby) > 1) nodes.push_back(nearby);
  }
  if (nodes.empty()) GTEST_SKIP() << "the system tells of no node with more CPUs than one";

  PlayedCpus cpus;
  played = &cpus;
  bool populated = true;
  bool helped = false;
  for (int attempt = 0; attempt < 200 && populated && !helped; ++attempt) { // a helper may come when all is done
    populated = HostRegion::map(std::size_t{64} << 20).populate(4);
    const std::lock_guard lock(cpus.mutex);
    helped = !cpus.kept.empty();
  }
  played = nullptr;
  EXPECT_TRUE(populated);
  EXPECT_TRUE(helped) << "nobody who helped was kept to any CPUs";
  EXPECT_FALSE(cpus.kept.contains(syscall(SYS_gettid))) << "the caller was moved";
  for (const auto& [thread, kept] : cpus.kept) {
    ASSERT_EQ(kept.size() % 2, 0U);
    for (std::size_t k = 0; k < kept.size(); k += 2) {
      const auto isIt = [&](const cpu_set_t& node) { return CPU_EQUAL(&node, &kept[k]) != 0; };
      EXPECT_TRUE(std::ranges::any_of(nodes, isIt)) << "kept to " << CPU_COUNT(&kept[k]) << " CPUs, which are of no node";
      EXPECT_TRUE(CPU_EQUAL(&kept[k + 1], &allowed)) << "and has the CPUs back that it had";
    }
  }
}

} // namespace
} // namespace offload
