// The one place where a host thread waits for the device.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>

namespace offload {

/// Runs `wait`, a call that blocks, with whatever locks of the embedding program let go of (the Python room lets go of the GIL).
/// Code that runs in a deleter, in a free-memory callback or under a lock of ours never calls it.
void hostWait(const std::function<void()>& wait);

/// All waits of the process, on whatever threads.
struct HostWaitStats {
  std::size_t count = 0;
  std::chrono::nanoseconds time{0};
};
HostWaitStats hostWaitStats() noexcept;

/// Sets what surrounds every wait. Called once, while the module loads.
void setHostWaitScope(std::function<void(const std::function<void()>&)> scope);

} // namespace offload
