// Note [A memory, not an accelerator]
// PyTorch knows one accelerator per process, and a registered PrivateUse1 backend takes the part from CUDA. Then autograd looks
// for streams of PrivateUse1 only, finds none on CUDA nodes, and every CUDA backward of the process dies of an internal assert
// (pytorch#161129). The part does not fit us either way: an offload tensor lives in host memory and has no queue of work of its
// own. Autograd has to treat it like a CPU tensor. So, of everything in PyTorch that asks,
//   getAccelerator(checked)     answers what it answered before the name was registered: CUDA, or none in a build without it;
//   isAccelerator(PrivateUse1)  answers no; for every other type, PyTorch's own answer.
// Both are needed: without the second, gradients on offload meet the same assert.
//
// How: the slots through which PyTorch's libraries call these two functions are pointed at ours (Note [Import slots]).
// libtorch_cpu calls its own two functions through slots too. Invariants:
//   - Only PyTorch's libraries are corrected. An extension that calls these functions itself still hears "PrivateUse1", and so
//     does this library: that is how the corrected answers reach PyTorch's own, and cannot call themselves.
//   - The accelerator is asked for before the name is registered, and never anew: CUDA, XPU, HIP and MPS are decided when PyTorch
//     is built. A runtime-detected one (MTIA, HPU) has to be loaded first.
//   - A registered name can't be taken back. So whether the slots lead anywhere is tested before there is one, when the corrected
//     answers are PyTorch's own: functions that note that they were called stand in them, and are called by what autograd calls.
//     Nothing of that starts a device: cuInit at import would break CUDA in forked children.
// Tried on torch 2.11 and 2.15: getAccelerator has a slot in libtorch_cpu, libtorch_python and libtorch_cuda, isAccelerator
// in the first two.
#include "compat/accelerator.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/input_buffer.h>
#include <torch/version.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "compat/import_slots.h"

namespace offload::compat {
namespace {

constexpr auto kUs = c10::DeviceType::PrivateUse1;

std::optional<c10::DeviceType> acceleratorBefore;
bool kept = false;

std::optional<c10::DeviceType> correctedGet(bool checked) {
  TORCH_CHECK(acceleratorBefore || !checked, "Cannot access accelerator device when none is available.");
  return acceleratorBefore;
}

bool correctedIs(c10::DeviceType type) {
  return type != kUs && at::accelerator::isAccelerator(type);
}

// The same answers, noted: what stands in the slots for the test.
std::atomic<int> getCalls{0};
std::atomic<int> isCalls{0};

std::optional<c10::DeviceType> notedGet(bool checked) {
  ++getCalls;
  return correctedGet(checked);
}

bool notedIs(c10::DeviceType type) {
  ++isCalls;
  return correctedIs(type);
}

static_assert(std::is_same_v<decltype(notedGet), decltype(at::accelerator::getAccelerator)>);
static_assert(std::is_same_v<decltype(notedIs), decltype(at::accelerator::isAccelerator)>);

// libtorch_cpu compares a stream with its accelerator before it sets it.
void askForTheAccelerator() {
  try {
    at::accelerator::setCurrentStream(c10::Stream(c10::Stream::DEFAULT, {kUs, 0}));
  } catch (const c10::Error&) { // ours is none
  }
}

// Autograd asks for each gradient whether its device has streams.
void askForOurStreams() {
  auto gradient = at::detail::make_tensor<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>(), c10::Device(kUs, 0));
  try {
    torch::autograd::InputBuffer(1).add(0, std::move(gradient), std::nullopt, std::nullopt, nullptr);
  } catch (const c10::Error&) {
  }
}

bool isPyTorchLibrary(std::string_view name) {
  return name.starts_with("libtorch.") || name.starts_with("libtorch_") || name.starts_with("libc10");
}

[[noreturn]] void refuse(const std::string& what) {
  throw ImportRefused(
      "torch_offload: " + what +
      " in torch " TORCH_VERSION
      ", so registering the offload device would break every CUDA backward in this process; use a torch version that this"
      " release of torch_offload supports, or set TORCH_OFFLOAD_ACCELERATOR=keep to import it all the same and go without"
      " CUDA autograd, CUDA graphs and pinned memory.");
}

// The slots of both functions; what was in them comes back unless they are kept.
class Slots {
 public:
  explicit Slots(const AcceleratorSymbols& symbols)
      : get_(findImportSlots(symbols.get, isPyTorchLibrary)), is_(findImportSlots(symbols.is, isPyTorchLibrary)) {
    for (const auto* slots : {&get_, &is_}) {
      for (const auto& slot : *slots) before_.emplace_back(slot, *slot.address);
    }
  }
  ~Slots() {
    if (keep_) return;
    for (const auto& [slot, function] : before_) {
      if (*slot.address != function) redirect(slot, function);
    }
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  void point(decltype(&correctedGet) get, decltype(&correctedIs) is) {
    for (const auto& slot : get_) redirect(slot, reinterpret_cast<void*>(get));
    for (const auto& slot : is_) redirect(slot, reinterpret_cast<void*>(is));
  }
  void keep() {
    keep_ = true;
  }
  bool hasGet() const {
    return !get_.empty();
  }
  bool hasIs() const {
    return !is_.empty();
  }

 private:
  std::vector<ImportSlot> get_;
  std::vector<ImportSlot> is_;
  std::vector<std::pair<ImportSlot, void*>> before_;
  bool keep_ = false;
};

bool keepsPyTorchsAnswer() {
  const char* value = std::getenv("TORCH_OFFLOAD_ACCELERATOR");
  if (!value || !*value) return false;
  if (std::string_view(value) == "keep") return true;
  throw ImportRefused(
      "torch_offload: TORCH_OFFLOAD_ACCELERATOR=" + std::string(value) + " is unknown; leave it unset, or set it to \"keep\".");
}

// What tells of another backend, or "". PyTorch's own kernels for PrivateUse1 are c10d's.
std::string anotherBackend() {
  if (c10::is_privateuse1_backend_registered()) return "its name is \"" + c10::get_privateuse1_backend() + "\"";
  if (c10::impl::hasDeviceGuardImpl(kUs)) return "it has registered a device guard";
  if (at::isPrivateUse1HooksRegistered()) return "it has registered hooks";
  auto& dispatcher = c10::Dispatcher::singleton();
  using c10::DispatchKey;
  for (const auto key : {DispatchKey::PrivateUse1, DispatchKey::AutogradPrivateUse1}) {
    for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
      if (name.name.starts_with("aten::")) return "it has registered a kernel for " + c10::toString(name);
    }
  }
  for (const auto key : {DispatchKey::PrivateUse1, DispatchKey::AutocastPrivateUse1, DispatchKey::QuantizedPrivateUse1}) {
    if (dispatcher.hasBackendFallbackForDispatchKey(key))
      return std::string("it has registered a fallback for ") + c10::toString(key);
  }
  return "";
}

} // namespace

void checkAlone() {
  const std::string sign = anotherBackend();
  if (sign.empty()) return;
  throw ImportRefused(
      "torch_offload: another PrivateUse1 backend is loaded in this process (" + sign +
      "), and PyTorch has room for one; import only one of the two.");
}

void correctAccelerator(const AcceleratorSymbols& symbols, const std::function<void()>& then) {
  kept = keepsPyTorchsAnswer();
  if (kept) return then();
  acceleratorBefore = at::accelerator::getAccelerator(false);
  Slots slots(symbols);
  if (!slots.hasGet()) refuse("no call of at::accelerator::getAccelerator could be found");
  if (!slots.hasIs()) refuse("no call of at::accelerator::isAccelerator could be found");
  try {
    slots.point(&notedGet, &notedIs);
    askForTheAccelerator();
    if (getCalls == 0) refuse("the offload device would still be taken for the current accelerator");
    askForOurStreams();
    if (isCalls == 0) refuse("autograd would still take the offload device for an accelerator");
    slots.point(&correctedGet, &correctedIs);
  } catch (const std::system_error& error) {
    refuse(std::string("the calls of at::accelerator can't be corrected (") + error.what() + ")");
  }
  then();
  slots.keep();
}

bool isAccelerator() {
  return kept;
}

} // namespace offload::compat
