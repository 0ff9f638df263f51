// Which CPUs a memory node has, as the kernel tells it.
#include "core/memory_node.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

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

} // namespace
} // namespace offload
