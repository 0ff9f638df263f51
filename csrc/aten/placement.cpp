#include "aten/placement.h"

#include "aten/fetch.h"
#include "aten/sparse.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

namespace offload {
namespace {

thread_local int hostScopes = 0;

constexpr c10::DispatchKeySet kTransformKeys({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize});
constexpr c10::DispatchKeySet kWrapperKeys = kTransformKeys | c10::DispatchKeySet(c10::DispatchKey::Python);

bool (*wrapperTest)(const at::Tensor&) = nullptr;

// A subclass elsewhere (a jagged tensor, say) is an activation, beside which its author expects tensors of its device. While tracing
// every tensor is in a wrapper of PyTorch's, which is no matter, and offload tensors may be in one of a user's.
bool isWrapped(const at::Tensor& tensor) {
  const bool offload = tensor.device().type() == kOffload;
  if (!tensor.key_set().has_any(offload ? kWrapperKeys : kTransformKeys)) return false;
  return !tracing() || (offload && isWrapper(tensor));
}

} // namespace

bool overlapsItself(const at::Tensor& tensor) {
  if (tensor.is_sparse() || tensor.is_non_overlapping_and_dense()) return false;
  c10::SmallVector<std::pair<std::int64_t, std::int64_t>, 6> dims; // by stride
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::ranges::sort(dims);
  std::int64_t reach = 0; // of the dimensions before
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

bool isBornOnDevice(const at::Tensor& offload) {
  if (isSparse(offload)) {
    const at::Tensor values = partsOf(offload).values;
    return values.numel() == 0 || isBornOnDevice(values); // what is put into an empty one, as into a gradient of zeros, is new
  }
  return offload.has_storage() && !offload.key_set().has(c10::DispatchKey::FuncTorchGradWrapper) &&
      offload.storage().nbytes() > 0 && blockOf(offload.storage()).born == Born::Device;
}

bool isUndecided(const at::Tensor& offload) {
  if (!offload.has_storage() || offload.requires_grad() || offload.storage().nbytes() == 0) return false;
  const Block& block = blockOf(offload.storage());
  return block.born == Born::Undecided && block.purpose == Purpose::Temporary;
}

void decideBirth(const at::Tensor& offload, Born born) {
  if (!isUndecided(offload)) return;
  Born open = Born::Undecided;
  blockOf(offload.storage()).born.compare_exchange_strong(open, born);
}

void Operands::add(const at::Tensor& tensor, bool written, bool out) {
  if (!tensor.defined()) return;
  const c10::Device device = tensor.device();
  requiresGrad = requiresGrad || tensor.requires_grad();
  const bool plain = !tensor.key_set().has_any(kWrapperKeys);
  wrapped = wrapped || isWrapped(tensor);
  writesInference = writesInference || (written && tensor.is_inference() && !c10::InferenceMode::is_enabled());
  const bool dims = tensor.dim() > 0 && !out; // an `out=` takes the shape of the result
  foreign = foreign || device.type() != kOffload;
  switch (device.type()) {
    case kOffload: {
      if (!offload) index = device.index();
      offload = true;
      offloadDims = offloadDims || dims;
      const bool traced = tracing();
      deviceBorn = deviceBorn || traced; // a graph moves, too, where it computes
      const bool onDevice = plain && !traced && isBornOnDevice(tensor);
      deviceBorn = deviceBorn || onDevice;
      if (!written) return;
      const bool undecided = plain && !traced && !onDevice && isUndecided(tensor);
      const bool overlaps = plain && !traced && overlapsItself(tensor);
      targetDeviceBorn = targetDeviceBorn || (onDevice && !overlaps);
      targetUndecided = targetUndecided || undecided;
      targetHostBorn = targetHostBorn || overlaps || !(onDevice || undecided);
      return;
    }
    case c10::DeviceType::CUDA:
      (dims ? cuda : cudaScalar) = device;
      if (written) plainTarget = device;
      return;
    case c10::DeviceType::CPU:
      cpu = cpu || dims;
      if (written) plainTarget = device;
      return;
    default:
      return;
  }
}

bool isWrapper(const at::Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) && wrapperTest != nullptr && wrapperTest(tensor);
}

void setWrapperTest(bool (*test)(const at::Tensor&)) {
  wrapperTest = test;
}

Placement place(const Operands& operands, Effect effect) {
  TORCH_CHECK(
      effect != Effect::InPlace || !operands.writesInference,
      "offload: Inplace update to inference tensor outside InferenceMode is not allowed: write to a clone, or in inference "
      "mode.");
  const c10::Device home(kOffload, operands.index);
  if (operands.cuda) return {*operands.cuda, false, home};
  // What is written to elsewhere decides, of whatever size: a kernel writes to one device.
  if (operands.plainTarget && operands.plainTarget->is_cuda()) return {*operands.plainTarget, false, home};
  if (operands.cpu || operands.plainTarget) {
    const Context& context = Context::get();
    // On the simulated link CPU tensors play CUDA's part, on whichever of its devices the first offload tensor is paired with.
    return {context.backend() == Backend::Sim ? pairedDevice(operands.index) : c10::Device(c10::kCPU), false, home};
  }
  if (operands.cudaScalar && !operands.offloadDims) return {*operands.cudaScalar, false, home};
  const bool first = operands.targetUndecided && !operands.targetHostBorn && operands.deviceBorn && !operands.drawn;
  const bool onDevice = !HostScope::active() && !operands.hostGenerator &&
      (effect == Effect::NewValue || (effect == Effect::Movement && operands.deviceBorn) ||
       (effect == Effect::InPlace && (operands.targetDeviceBorn || first)));
  return {onDevice ? pairedDevice(operands.index) : c10::Device(c10::kCPU), true, home};
}

bool HostScope::active() noexcept {
  return hostScopes > 0;
}

void HostScope::enter() noexcept {
  ++hostScopes;
}

void HostScope::leave() noexcept {
  if (hostScopes > 0) --hostScopes;
}

bool tracing() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Key = c10::impl::TorchDispatchModeKey;
  if (!Modes::any_modes_set()) return false;
  return Modes::get_mode(Key::FAKE).has_value() || Modes::get_mode(Key::PROXY).has_value() ||
      Modes::get_mode(Key::FUNCTIONAL).has_value();
}

} // namespace offload
