#include "core/host_wait.h"

#include <utility>

namespace offload {
namespace {

std::function<void(const std::function<void()>&)>& scope() {
  static auto* instance = new std::function<void(const std::function<void()>&)>();
  return *instance;
}

} // namespace

void hostWait(const std::function<void()>& wait) {
  if (scope()) {
    scope()(wait);
  } else {
    wait();
  }
}

void setHostWaitScope(std::function<void(const std::function<void()>&)> newScope) {
  scope() = std::move(newScope);
}

} // namespace offload
