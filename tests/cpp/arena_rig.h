// What the Arena's tests share: a Link that remembers what is page-locked, and memory that is or isn't there.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "core_rig.h"

namespace offload::core_test {

/// Page-locks nothing, and remembers what it was asked. Refuses what would make more than `capacity` bytes.
class LockingLink : public FaultLink {
 public:
  using FaultLink::FaultLink;
  bool registerHost(void* host, std::size_t bytes) override {
    ++attempts;
    if (!FaultLink::registerHost(host, bytes)) {
      return false;
    }
    const std::lock_guard lock(mutex);
    if (lockedBytes + bytes > capacity) {
      ++refusals;
      return false;
    }
    locked[host] = bytes;
    lockedBytes += bytes;
    return true;
  }
  void unregisterHost(void* host, std::size_t bytes) noexcept override {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(locked.at(host), bytes);
    locked.erase(host);
    lockedBytes -= bytes;
    FaultLink::unregisterHost(host, bytes);
  }
  bool query(Event event) override {
    ++queries;
    return answer ? *answer : FaultLink::query(event);
  }

  std::mutex mutex;
  std::map<void*, std::size_t> locked;
  std::size_t lockedBytes = 0;
  std::size_t capacity = SIZE_MAX;
  std::atomic<int> attempts{0};
  std::atomic<int> refusals{0};
  std::atomic<int> queries{0};
  std::optional<bool> answer; // to every query, in place of the simulation's
};

template <class OuterLink = LockingLink>
struct BasicArenaRig {
  explicit BasicArenaRig(ArenaOptions options = smallRegions())
      : link(sim), arena(&link, withWarnings(std::move(options))), pool(link) {}

  ArenaOptions withWarnings(ArenaOptions options) {
    options.warn = [this](const std::string& sentence) { warnings.push_back(sentence); };
    return options;
  }

  std::vector<std::string> warnings;
  SimLink sim{{.bias = SimBias::Late}};
  OuterLink link;
  Arena arena;
  EventPool pool;
  Stream stream = sim.createStream(0);
};
using ArenaRig = BasicArenaRig<>;

/// Regions of the usual sizes whose memory is never touched, on a machine that has more than any test asks for.
inline ArenaOptions untouched() {
  ArenaOptions options;
  options.prefault = false;
  options.memoryLimits = [] { return MemoryLimits{std::size_t{1} << 42, std::size_t{1} << 42}; };
  return options;
}

/// Pages of the memory that the process has; -1 where some of it isn't mapped at all.
inline std::ptrdiff_t residentPages(void* data, std::size_t bytes) {
  std::vector<unsigned char> pages(wholePages(bytes) / wholePages(1));
  if (mincore(data, bytes, pages.data()) != 0) {
    return -1;
  }
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1U; });
}

} // namespace offload::core_test
