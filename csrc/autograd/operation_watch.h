// Kernels of ours for every operation, whenever it is defined.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace offload {

/// Note [Operations defined later]
/// The dispatcher tells of an operation as soon as it is defined, with its own lock held, before its kernels are there. So the
/// name is only written down then, and catchUp() registers: for what the dispatcher knew at the first call, and at every later one
/// for what has been defined since. A definition that is taken back (a notebook's cell that runs again) loses its kernels.
class OperationWatch {
 public:
  using Kernels = std::vector<std::pair<c10::DispatchKey, c10::KernelFunction>>;
  /// The kernels for an operation; `late` where its own ones may still be missing.
  using Make = std::function<Kernels(const c10::OperatorHandle&, bool late)>;

  explicit OperationWatch(Make make);

  /// How many operations got kernels.
  std::size_t catchUp();
  bool isBehind() const noexcept {
    return behind_.load(std::memory_order_relaxed);
  }

 private:
  class Listener;
  void note(const c10::OperatorName& name);

  const Make make_;
  std::mutex catchUpMutex_; // may be held while the dispatcher's lock is taken, the other one not
  std::unordered_map<c10::OperatorName, std::vector<c10::RegistrationHandleRAII>> registered_;
  bool late_ = false;
  std::mutex notedMutex_;
  std::vector<c10::OperatorName> noted_;
  std::atomic<bool> behind_{false};
  c10::RegistrationHandleRAII listening_;
};

} // namespace offload
