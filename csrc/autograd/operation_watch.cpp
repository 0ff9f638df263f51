#include "autograd/operation_watch.h"

namespace offload {

class OperationWatch::Listener final : public c10::OpRegistrationListener {
 public:
  explicit Listener(OperationWatch& watch) : watch_(watch) {}

  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    watch_.note(op.operator_name());
  }

  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    watch_.note(op.operator_name());
  }

 private:
  OperationWatch& watch_;
};

OperationWatch::OperationWatch(Make make)
    : make_(std::move(make)),
      listening_(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>(*this))) {}

void OperationWatch::note(const c10::OperatorName& name) {
  std::lock_guard lock(notedMutex_);
  noted_.push_back(name);
  behind_ = true;
}

std::size_t OperationWatch::catchUp() {
  std::lock_guard lock(catchUpMutex_);
  std::vector<c10::OperatorName> names;
  {
    std::lock_guard notedLock(notedMutex_);
    names.swap(noted_);
    behind_ = false;
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  std::size_t count = 0;
  for (const auto& name : names) {
    registered_.erase(name);
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    auto kernels = make_(*op, late_);
    if (kernels.empty()) continue;
    ++count;
    auto& handles = registered_[name];
    for (auto& [key, kernel] : kernels) {
      handles.push_back(dispatcher.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "torch_offload"));
    }
  }
  late_ = true;
  return count;
}

} // namespace offload
