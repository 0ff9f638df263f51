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
//   - The accelerator is asked for before any initializer of this library can have registered the name, and never anew: CUDA,
//     XPU, HIP and MPS are decided when PyTorch is built. A runtime-detected one (MTIA, HPU) has to be loaded first.
//   - The test goes through libtorch_cpu's slots, which autograd uses, in ways that start no device: cuInit at import would
//     break CUDA in forked children.
// Tried on torch 2.11 and 2.15: getAccelerator has a slot in libtorch_cpu, libtorch_python and libtorch_cuda, isAccelerator
// in the first two.
#include "compat/accelerator.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/input_buffer.h>
#include <torch/version.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>

#include "compat/import_slots.h"

namespace offload::compat {
namespace {

constexpr std::string_view kGetSymbol = "_ZN2at11accelerator14getAcceleratorEb";
constexpr std::string_view kIsSymbol = "_ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE";

/// Asked before every other initializer of this library, whatever the order of its object files.
[[gnu::init_priority(101)]] const std::optional<c10::DeviceType> kAcceleratorBefore = at::accelerator::getAccelerator(false);

std::optional<c10::DeviceType> correctedGet(bool checked) {
  TORCH_CHECK(kAcceleratorBefore || !checked, "Cannot access accelerator device when none is available.");
  return kAcceleratorBefore;
}

bool correctedIs(c10::DeviceType type) {
  return type != c10::DeviceType::PrivateUse1 && at::accelerator::isAccelerator(type);
}

/// Whether libtorch_cpu takes PrivateUse1 for the current accelerator: only then does it accept a stream of ours as current.
bool libtorchHasUsAsCurrent() {
  try {
    at::accelerator::setCurrentStream(c10::Stream(c10::Stream::DEFAULT, {c10::DeviceType::PrivateUse1, 0}));
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

/// Whether autograd wants streams for PrivateUse1 gradients: only then does it refuse one that comes without.
bool autogradWantsOurStreams() {
  auto gradient = at::detail::make_tensor<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>(),
      c10::Device(c10::DeviceType::PrivateUse1, 0));
  try {
    torch::autograd::InputBuffer(1).add(0, std::move(gradient), std::nullopt, std::nullopt, nullptr);
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

bool answersAreRight() {
  return !libtorchHasUsAsCurrent() && !autogradWantsOurStreams();
}

static_assert(std::is_same_v<decltype(correctedGet), decltype(at::accelerator::getAccelerator)>);
static_assert(std::is_same_v<decltype(correctedIs), decltype(at::accelerator::isAccelerator)>);

bool isPyTorchLibrary(std::string_view name) {
  return name.starts_with("libtorch.") || name.starts_with("libtorch_") || name.starts_with("libc10");
}

int redirectAll(std::string_view symbol, void* function, std::set<std::string>& libraries) {
  const auto slots = findImportSlots(symbol, isPyTorchLibrary);
  for (const auto& slot : slots) {
    redirect(slot, function);
    libraries.insert(slot.library);
  }
  return static_cast<int>(slots.size());
}

std::string join(const std::set<std::string>& names) {
  std::string joined;
  for (const auto& name : names) joined += (joined.empty() ? "" : ", ") + name;
  return joined;
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error(
      "torch_offload: " + what +
      " in torch " TORCH_VERSION
      ", so registering the offload device would break every CUDA backward in this process; use a torch version that this"
      " release of torch_offload supports, or set TORCH_OFFLOAD_ACCELERATOR=keep to import it all the same and go without"
      " CUDA autograd, CUDA graphs and pinned memory.");
}

bool keepsPyTorchsAnswer() {
  const char* value = std::getenv("TORCH_OFFLOAD_ACCELERATOR");
  if (!value || !*value) return false;
  if (std::string_view(value) == "keep") return true;
  throw std::runtime_error(
      "torch_offload: TORCH_OFFLOAD_ACCELERATOR=" + std::string(value) + " is unknown; leave it unset, or set it to \"keep\".");
}

} // namespace

AcceleratorReport correctAccelerator() {
  static bool corrected = false;
  constexpr auto us = c10::DeviceType::PrivateUse1;

  if (keepsPyTorchsAnswer()) return {0, 0, "kept as it is by TORCH_OFFLOAD_ACCELERATOR=keep"};
  TORCH_INTERNAL_ASSERT(c10::is_privateuse1_backend_registered() && c10::impl::hasDeviceGuardImpl(us));
  if (kAcceleratorBefore == us)
    throw std::runtime_error("torch_offload: another PrivateUse1 backend is already loaded; import only one of the two.");
  if (!corrected && at::accelerator::getAccelerator(false) == kAcceleratorBefore && !at::accelerator::isAccelerator(us) &&
      answersAreRight())
    return {0, 0, "PyTorch's own answer is right"};

  std::set<std::string> libraries;
  AcceleratorReport report;
  report.getSlots = redirectAll(kGetSymbol, reinterpret_cast<void*>(&correctedGet), libraries);
  report.isSlots = redirectAll(kIsSymbol, reinterpret_cast<void*>(&correctedIs), libraries);
  report.where = join(libraries);
  if (report.getSlots == 0) refuse("no call of at::accelerator::getAccelerator could be found");
  if (report.isSlots == 0) refuse("no call of at::accelerator::isAccelerator could be found");
  if (libtorchHasUsAsCurrent()) refuse("the offload device is still taken for the current accelerator");
  if (autogradWantsOurStreams()) refuse("autograd still takes the offload device for an accelerator");
  corrected = true;
  return report;
}

} // namespace offload::compat
