// Factories, resize_ and set_.
#include "aten/placement.h"
#include "aten/refusals.h"
#include "aten/tensors.h"
#include "compat/registration.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/blackman_window.h>
#include <ATen/ops/full_like_native.h>
#include <ATen/ops/kaiser_window.h>
#include <ATen/ops/new_full_native.h>
#include <ATen/ops/new_ones_native.h>
#include <ATen/ops/new_zeros_native.h>
#include <ATen/ops/ones_like_native.h>
#include <ATen/ops/zeros_like_native.h>

#include <utility>

namespace offload {
namespace {

// Of what this thread makes without a value.
thread_local Born theBirth = Born::Undecided;

class BirthScope {
 public:
  explicit BirthScope(Born born) : before_(std::exchange(theBirth, born)) {}
  BirthScope(const BirthScope&) = delete;
  BirthScope& operator=(const BirthScope&) = delete;
  ~BirthScope() {
    theBirth = before_;
  }

 private:
  const Born before_;
};

// PyTorch's factory of a constant like a tensor, which makes memory and fills it. It is made on the device where the tensor was.
template <auto>
struct BornLike;

template <class... Arguments, at::Tensor (*factory)(const at::Tensor&, Arguments...)>
struct BornLike<factory> {
  static at::Tensor call(const at::Tensor& like, Arguments... arguments) {
    const bool there = !HostScope::active() && isBornOnDevice(like);
    const BirthScope scope(there ? Born::Device : Born::Undecided);
    return factory(like, arguments...);
  }
};

void checkOptions(std::optional<at::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(
      layout.value_or(at::kStrided) == at::kStrided, "offload: tensors of layout ", *layout,
      " can't live on the offload device; make a dense one, or keep it on the CPU.");
  if (pinned.value_or(false)) refusePinned();
}

// torch.utils.deterministic.fill_uninitialized_memory
bool fillsWhatIsNew() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

at::Tensor emptyStrided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned) {
  checkOptions(layout, pinned);
  at::detail::check_size_nonnegative(sizes);
  auto result = emptyOffload(sizes, strides, c10::dtype_or_default(type), device.value_or(at::Device(kOffload)), theBirth);
  if (fillsWhatIsNew()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    at::native::fill_empty_deterministic_(result);
  }
  return result;
}

at::Tensor emptyMemoryFormat(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  auto result = emptyStrided(sizes, c10::contiguous_strides(sizes), type, layout, device, pinned);
  const auto wanted = format.value_or(at::MemoryFormat::Contiguous);
  if (wanted != at::MemoryFormat::Contiguous) result.unsafeGetTensorImpl()->empty_tensor_restride(wanted);
  return result;
}

void growStorage(c10::TensorImpl& impl) {
  const auto needed = at::detail::computeStorageNbytes(impl.sizes(), impl.strides(), impl.itemsize(), impl.storage_offset());
  auto* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  if (impl.numel() > 0 && storage->nbytes() < needed) resizeStorage(*storage, needed);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto& impl = *self.unsafeGetTensorImpl();
  // Both throw before anything has changed.
  at::detail::check_size_nonnegative(sizes);
  at::detail::computeStorageNbytesContiguous(sizes, impl.itemsize(), impl.storage_offset());
  const bool resizes = impl.sizes() != sizes; // or the strides stay, too
  const bool restrides = format && *format != at::MemoryFormat::Preserve;
  if (resizes) impl.set_sizes_contiguous(sizes);
  if (restrides) impl.empty_tensor_restride(*format);
  if (resizes || restrides) {
    const auto before = static_cast<std::int64_t>(impl.unsafe_storage().nbytes());
    growStorage(impl);
    if (fillsWhatIsNew()) {
      const at::AutoDispatchBelowADInplaceOrView below;
      at::native::fill_resize_deterministic_(self, before);
    }
  }
  return self;
}

at::Tensor& setStorageOffset(
    at::Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  TORCH_CHECK(
      source.device().type() == kOffload && isOffload(self), "offload: set_ was given a storage on ", source.device(),
      " for a tensor on ", self.device(), "; both must be on the same device.");
  TORCH_CHECK(offset >= 0, "offload: set_ was given the storage offset ", offset, "; it must be 0 or more.");
  at::detail::check_size_nonnegative(sizes);
  const c10::DimVector contiguous = strides.empty() ? c10::contiguous_strides(sizes) : c10::DimVector();
  if (strides.empty()) strides = contiguous;
  TORCH_CHECK(
      strides.size() == sizes.size(), "offload: set_ was given ", sizes.size(), " sizes and ", strides.size(),
      " strides; give as many of one as of the other, or no strides.");
  for (const auto stride : strides) {
    TORCH_CHECK(stride >= 0, "offload: set_ was given the strides ", strides, "; each must be 0 or more.");
  }
  auto& impl = *self.unsafeGetTensorImpl();
  // Throws where the bytes can't be counted, before anything has changed.
  at::detail::computeStorageNbytes(sizes, strides, impl.itemsize(), offset);
  impl.set_storage_keep_dtype(std::move(source));
  impl.set_storage_offset(offset);
  impl.set_sizes_and_strides(sizes, strides);
  growStorage(impl);
  return self;
}

at::Tensor& setStorage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<std::int64_t>(source.nbytes() / self.dtype().itemsize());
  return setStorageOffset(self, std::move(source), 0, {count}, {});
}

at::Tensor& setTensor(at::Tensor& self, const at::Tensor& source) {
  return setStorageOffset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& setEmpty(at::Tensor& self) {
  auto data = Context::get().newBlock(0, self.device().index(), Born::Host);
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, std::move(data), offloadAllocator(), true);
  return setStorageOffset(self, std::move(storage), 0, {0}, {});
}

// Values of factories are the CPU's. PyTorch fills most in place, which is the host's to do where they are new; of these two it makes
// one by a kernel that offload has none of, the other of values in between, which would be computed on the device.
at::Tensor keptOnHost(const at::Tensor& values, std::optional<at::Device> device) {
  const c10::Device home = device.value_or(at::Device(kOffload));
  auto result = emptyOffload(values.sizes(), values.strides(), values.scalar_type(), home, Born::Host);
  result.copy_(values);
  return result;
}

at::TensorOptions onCpu(std::optional<at::ScalarType> type) {
  return at::TensorOptions().dtype(type).device(at::kCPU);
}

at::Tensor blackmanWindowPeriodic(
    std::int64_t length, bool periodic, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned) {
  checkOptions(layout, pinned);
  return keptOnHost(at::blackman_window(length, periodic, onCpu(type)), device);
}

at::Tensor blackmanWindow(
    std::int64_t length, std::optional<at::ScalarType> type, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pinned) {
  return blackmanWindowPeriodic(length, true, type, layout, device, pinned);
}

at::Tensor kaiserWindowBeta(
    std::int64_t length, bool periodic, double beta, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned) {
  checkOptions(layout, pinned);
  return keptOnHost(at::kaiser_window(length, periodic, beta, onCpu(type)), device);
}

at::Tensor kaiserWindowPeriodic(
    std::int64_t length, bool periodic, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned) {
  return kaiserWindowBeta(length, periodic, 12.0, type, layout, device, pinned);
}

at::Tensor kaiserWindow(
    std::int64_t length, std::optional<at::ScalarType> type, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pinned) {
  return kaiserWindowPeriodic(length, true, type, layout, device, pinned);
}

bool isSetTo(const at::Tensor& self, const at::Tensor& source) {
  return self.storage().unsafeGetStorageImpl() == source.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() && self.strides() == source.strides();
}

// Module.to() asks this to decide whether a Parameter may keep its object: then ties and the optimizer's references survive a move.
bool hasCompatibleShallowCopyType(const at::Tensor& self, const at::Tensor& from) {
  auto dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
        (tensor.is_cpu() || tensor.is_cuda() || isOffload(tensor));
  };
  return dense(self) && dense(from);
}

} // namespace

OFFLOAD_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", emptyMemoryFormat);
  m.impl("empty_strided", emptyStrided);
  m.impl("zeros_like", BornLike<&at::native::zeros_like>::call);
  m.impl("ones_like", BornLike<&at::native::ones_like>::call);
  m.impl("full_like", BornLike<&at::native::full_like>::call);
  m.impl("new_zeros", BornLike<&at::native::new_zeros>::call);
  m.impl("new_ones", BornLike<&at::native::new_ones>::call);
  m.impl("new_full", BornLike<&at::native::new_full>::call);
  m.impl("blackman_window", blackmanWindow);
  m.impl("blackman_window.periodic", blackmanWindowPeriodic);
  m.impl("kaiser_window", kaiserWindow);
  m.impl("kaiser_window.periodic", kaiserWindowPeriodic);
  m.impl("kaiser_window.beta", kaiserWindowBeta);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", setStorageOffset);
  m.impl("set_.source_Storage", setStorage);
  m.impl("set_.source_Tensor", setTensor);
  m.impl("set_", setEmpty);
  m.impl("is_set_to", isSetTo);
  m.impl("_has_compatible_shallow_copy_type", hasCompatibleShallowCopyType);
}

OFFLOAD_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("is_set_to", torch::CppFunction::makeFallthrough());
  m.impl("_has_compatible_shallow_copy_type", hasCompatibleShallowCopyType);
}

} // namespace offload
