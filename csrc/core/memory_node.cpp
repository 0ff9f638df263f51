#include "core/memory_node.h"

#include <fstream>

namespace offload {
namespace {

// The CPUs of a list of the kernel's, "0-15,32-47".
cpu_set_t cpusIn(std::istream& list) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  int first = 0;
  while (list >> first) {
    int last = first;
    if (list.peek() == '-') {
      list.get();
      list >> last;
    }
    for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &cpus);
    if (list.peek() == ',') list.get();
  }
  return cpus;
}

} // namespace

cpu_set_t cpusOfNode(unsigned node, const cpu_set_t& allowed, const std::string& root) {
  std::ifstream list(root + "/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  cpu_set_t nearby = cpusIn(list);
  CPU_AND(&nearby, &nearby, &allowed);
  return CPU_COUNT(&nearby) > 0 ? nearby : allowed;
}

} // namespace offload
