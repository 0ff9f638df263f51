// The file descriptors that this process may have.
#pragma once

#include <cstddef>
#include <optional>

namespace offload {

/// How many are left for files, pipes and sockets of the rest of the program: without any it could neither send what is shared nor
/// import a module.
constexpr std::size_t kDescriptorsForOthers = 32;

struct DescriptorShortage {
  std::size_t used = 0;
  std::size_t most = 0; // the hard limit
};

/// Sees to it that so many are left beside one more, by raising the soft limit as far as the hard one goes; what there is where that
/// is not enough. Throws Error where the whole system has none.
std::optional<DescriptorShortage> raiseDescriptorLimit();

} // namespace offload
