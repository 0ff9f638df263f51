#include "core/deferred_error.h"

#include "core/error.h"

#include <utility>

namespace offload {

void DeferredError::keep(std::string sentence) noexcept {
  const std::lock_guard lock(mutex_);
  if (kept_) return;
  sentence_ = std::move(sentence);
  kept_ = true;
}

void DeferredError::raise() {
  if (!kept_) return;
  const std::lock_guard lock(mutex_);
  if (!kept_.exchange(false)) return; // another thread has thrown it
  throw Error(std::exchange(sentence_, {}));
}

} // namespace offload
