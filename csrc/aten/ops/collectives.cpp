// torch.distributed: its backends know no offload device, and the error says what to do instead.
#include "aten/refusals.h"
#include "compat/quiet_registration.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace offload {
namespace {

// PyTorch's own kernel looks for the device's backend in the process group. A backend that somebody has made for offload is left alone.
class Collective final : public c10::OperatorKernel {
 public:
  explicit Collective(const c10::OperatorHandle& op)
      : below_(op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    try {
      below_.callBoxed(op, keys, stack);
    } catch (const c10::Error& error) {
      // No backend for it, or one that was named for it (`offload:gloo`) and refuses.
      const std::string_view told = error.what_without_backtrace();
      if (told.find("device type offload") == std::string_view::npos) throw;
      TORCH_CHECK(
          false, "offload: torch.distributed can't communicate offload tensors (", op.schema().name(),
          "), since no backend of this process group takes them; give it copies on the CPU or on CUDA, and "
          "DistributedDataParallel a model that is there.");
    }
  }

 private:
  const c10::SafeKernelFunction below_;
};

} // namespace

void interceptCollectives() {
  const compat::QuietRegistration quiet;
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>(); // as long as the dispatcher
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || !name.name.starts_with("c10d::") || !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Collective>(*op));
    registered->push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::PrivateUse1, std::move(kernel), std::nullopt, nullptr, "torch_offload"));
  }
}

} // namespace offload
