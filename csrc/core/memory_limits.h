// How much host memory the system lets this process have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace offload {

struct MemoryLimits {
  std::size_t total = SIZE_MAX; // what there is, or the limit of the container if that is less
  std::size_t available = SIZE_MAX; // what may still be taken; file pages count, since the kernel gives them up
  std::size_t swap = SIZE_MAX; // what may be swapped out beside
};

/// Reads /proc/meminfo and the limits of the control groups (both versions) that this process is in. What can't be read does not
/// limit. `root` stands before every path, for tests.
MemoryLimits readMemoryLimits(const std::string& root = "");

} // namespace offload
