// What went wrong where nobody could be told.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

namespace offload {

/// Takes the failure of a host task, which can't throw, to the next call that can.
class DeferredError {
 public:
  /// Keeps a sentence; the first one, where several come before anybody asks.
  void keep(std::string sentence) noexcept;
  /// Throws Error, once, if something was kept.
  void raise();

 private:
  std::atomic<bool> kept_{false};
  std::mutex mutex_;
  std::string sentence_;
};

} // namespace offload
