#include "core/forked.h"

#include <pthread.h>

#include <atomic>

namespace offload {
namespace {

std::atomic<bool> forked{false};

} // namespace

void noteForks() {
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
}

bool isForked() noexcept {
  return forked.load(std::memory_order_relaxed);
}

} // namespace offload
