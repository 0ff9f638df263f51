// `record_stream` on a fetched tensor: its Slot, too, waits for work on that stream.
#include "aten/cuda_glue.h"
#include "aten/fetch.h"
#include "compat/quiet_registration.h"
#include "compat/registration.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace offload {
namespace {

// PyTorch's own kernel takes memory of another allocator for nobody's concern, and returns.
class RecordStream final : public c10::OperatorKernel {
 public:
  explicit RecordStream(const c10::OperatorHandle& op) : below_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto arguments = torch::jit::last(*stack, 2);
    const at::Tensor tensor = arguments[0].toTensor();
    const c10::Stream stream = arguments[1].toStream();
    if (stream.device_type() != c10::kCUDA || !useFetchedOn(tensor, cuda::streamOf(stream))) {
      return below_.callBoxed(op, keys, stack);
    }
    torch::jit::drop(*stack, 2);
  }

 private:
  const c10::SafeKernelFunction below_;
};

// Host memory belongs to no stream.
void recordStream(at::Tensor& /*self*/, at::Stream /*stream*/) {}

} // namespace

void interceptRecordStream() {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto op = dispatcher.findSchemaOrThrow("aten::record_stream", "");
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return;
  const compat::QuietRegistration quiet;
  static auto* registered = new c10::RegistrationHandleRAII(dispatcher.registerImpl(
      op.operator_name(), c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<RecordStream>(op)),
      std::nullopt, nullptr, "torch_offload"));
  (void)registered;
}

OFFLOAD_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("record_stream", recordStream);
}

} // namespace offload
