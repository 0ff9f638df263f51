#include "core/memory_limits.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

namespace offload {
namespace {

// Where a version keeps its numbers.
struct GroupFiles {
  const char* limits[2];
  const char* swap; // in the second version; the first one's is of memory and swap together
  const char* withSwap;
  const char* used;
  const char* filePages[2]; // in memory.stat
};
constexpr GroupFiles kVersion1 = {
    {"memory.limit_in_bytes", nullptr},
    nullptr,
    "memory.memsw.limit_in_bytes",
    "memory.usage_in_bytes",
    {"total_active_file", "total_inactive_file"}};
constexpr GroupFiles kVersion2 = {
    {"memory.max", "memory.high"}, "memory.swap.max", nullptr, "memory.current", {"active_file", "inactive_file"}};

std::size_t minus(std::size_t from, std::size_t what) {
  return from - std::min(from, what);
}

// The number that a file holds; `otherwise` where there is none ("max").
std::size_t numberIn(const std::string& path, std::size_t otherwise) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : otherwise;
}

// The number behind `name` in a file of lines "name number"; 0 where it is not.
std::size_t numberOf(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    std::size_t value = 0;
    if (words >> word && word == name && words >> value) return value;
  }
  return 0;
}

void applyLimit(MemoryLimits& limits, const std::string& group, const GroupFiles& files) {
  std::size_t limit = SIZE_MAX;
  for (const char* name : files.limits) {
    if (name != nullptr) limit = std::min(limit, numberIn(group + "/" + name, SIZE_MAX));
  }
  limits.total = std::min(limits.total, limit);
  if (files.swap != nullptr) limits.swap = std::min(limits.swap, numberIn(group + "/" + files.swap, SIZE_MAX));
  if (files.withSwap != nullptr) {
    const std::size_t both = numberIn(group + "/" + files.withSwap, SIZE_MAX);
    if (both < SIZE_MAX) limits.swap = std::min(limits.swap, minus(both, limits.total));
  }
  if (limit == SIZE_MAX) return;
  std::size_t used = numberIn(group + "/" + files.used, 0);
  for (const char* name : files.filePages) used = minus(used, numberOf(group + "/memory.stat", name));
  limits.available = std::min(limits.available, minus(limit, used));
}

// Every group up to the mount binds. `group` is this process's, as the kernel names it; `top` the group that is mounted, which in a
// container may be ours or one above it.
void applyUpwards(
    MemoryLimits& limits, const std::string& mount, const std::string& top, std::string group, const GroupFiles& files) {
  if (top != "/" && group.starts_with(top)) group.erase(0, top.size());
  if (!group.starts_with('/') || group.starts_with("/..")) group.clear(); // the mount itself, or outside what it shows
  while (group.size() > 1) {
    applyLimit(limits, mount + group, files);
    group.erase(group.rfind('/'));
  }
  applyLimit(limits, mount, files);
}

// Whether a list with commas has the word.
bool lists(const std::string& words, const std::string& word) {
  return ("," + words + ",").find("," + word + ",") != std::string::npos;
}

// This process's group, from lines "number:controllers:path". The second version, asked for with "", names no controllers.
std::string groupOf(const std::string& root, const std::string& controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    if (lists(line.substr(first + 1, second - first - 1), controller)) return line.substr(second + 1);
  }
  return "";
}

} // namespace

MemoryLimits readMemoryLimits(const std::string& root) {
  MemoryLimits limits;
  const std::string meminfo = root + "/proc/meminfo";
  if (const std::size_t total = numberOf(meminfo, "MemTotal:"); total > 0) {
    limits.total = total << 10;
    limits.swap = numberOf(meminfo, "SwapTotal:") << 10;
    if (const std::size_t available = numberOf(meminfo, "MemAvailable:"); available > 0) limits.available = available << 10;
  }
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    // "36 35 98:0 TOP MOUNT options ... - TYPE source options"
    std::istringstream words(line);
    std::string skipped, top, mount, type, options;
    words >> skipped >> skipped >> skipped >> top >> mount;
    while (words >> skipped && skipped != "-") {
    }
    words >> type >> skipped >> options;
    if (type == "cgroup2") {
      applyUpwards(limits, root + mount, top, groupOf(root, ""), kVersion2);
    } else if (type == "cgroup" && lists(options, "memory")) {
      applyUpwards(limits, root + mount, top, groupOf(root, "memory"), kVersion1);
    }
  }
  limits.available = std::min(limits.available, limits.total);
  return limits;
}

} // namespace offload
