#include "core/host_wait.h"

#include <atomic>
#include <utility>

namespace offload {
namespace {

std::function<void(const std::function<void()>&)>& scope() {
  static auto* instance = new std::function<void(const std::function<void()>&)>();
  return *instance;
}

std::atomic<std::size_t> waits = 0;
std::atomic<std::chrono::nanoseconds::rep> waited = 0;

// Counts a wait also where it ends with an exception.
struct Counted {
  using Clock = std::chrono::steady_clock;
  ~Counted() {
    waits.fetch_add(1, std::memory_order_relaxed);
    waited.fetch_add(std::chrono::nanoseconds(Clock::now() - since).count(), std::memory_order_relaxed);
  }
  const Clock::time_point since = Clock::now();
};

} // namespace

void hostWait(const std::function<void()>& wait) {
  const Counted counted;
  if (scope()) {
    scope()(wait);
  } else {
    wait();
  }
}

HostWaitStats hostWaitStats() noexcept {
  return {waits.load(std::memory_order_relaxed), std::chrono::nanoseconds(waited.load(std::memory_order_relaxed))};
}

void setHostWaitScope(std::function<void(const std::function<void()>&)> newScope) {
  scope() = std::move(newScope);
}

} // namespace offload
