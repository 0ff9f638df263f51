// Which CPUs are near which memory.
#pragma once

#include <sched.h>

#include <string>

namespace offload {

/// Those of `allowed` that are on a memory node; all of them where that can't be told, or none is. `root` stands before every path,
/// for tests.
cpu_set_t cpusOfNode(unsigned node, const cpu_set_t& allowed, const std::string& root = "");

} // namespace offload
