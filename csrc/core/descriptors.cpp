#include "core/descriptors.h"

#include "core/error.h"

#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace offload {
namespace {

// How many there are up to the fourth number that is free: the first may be a gap, as who receives a descriptor closes the socket that
// he opened before it.
rlim_t descriptorsInUse(rlim_t limit) {
  std::array<int, 4> probes{};
  std::size_t free = 0;
  while (free < probes.size() && (probes[free] = eventfd(0, EFD_CLOEXEC)) >= 0) ++free;
  const int code = errno;
  for (std::size_t k = 0; k < free; ++k) close(probes[k]);
  if (free == probes.size()) return static_cast<rlim_t>(probes.back()) + 1 - free;
  if (code == EMFILE) return limit - std::min<rlim_t>(limit, free);
  throw Error(std::string("offload: the system has no file descriptor left: ") + std::strerror(code) + ".");
}

} // namespace

// By doubling: a hard limit may be 2^30, and there are programs that go through all numbers below the soft one.
std::optional<DescriptorShortage> raiseDescriptorLimit() {
  for (;;) {
    struct rlimit limit {};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return std::nullopt;
    const rlim_t used = descriptorsInUse(limit.rlim_cur);
    if (limit.rlim_cur > used && limit.rlim_cur - used > kDescriptorsForOthers) return std::nullopt;
    struct rlimit more = limit;
    more.rlim_cur = std::min(2 * limit.rlim_cur, limit.rlim_max);
    if (more.rlim_cur > limit.rlim_cur && setrlimit(RLIMIT_NOFILE, &more) == 0) continue;
    return DescriptorShortage{used, limit.rlim_max};
  }
}

} // namespace offload
