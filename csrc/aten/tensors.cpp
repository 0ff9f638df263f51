#include "aten/tensors.h"

#include "aten/captured_graph.h"
#include "compat/named_tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <cstring>

namespace offload {
namespace {

// PyTorch reports the error when two tensors of different devices meet; a context that isn't a Block must never be taken for one.
c10::DispatchKeySet keysOf(c10::DeviceType type) {
  switch (type) {
    case c10::DeviceType::CPU:
      return c10::DispatchKeySet(c10::DispatchKey::CPU);
    case c10::DeviceType::CUDA:
      return c10::DispatchKeySet(c10::DispatchKey::CUDA);
    default:
      return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
}

thread_local c10::DeviceIndex theCurrentIndex = 0;

class OffloadAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    return Context::get().newBlock(bytes, theCurrentIndex, Born::Host);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

} // namespace

Extent extentOf(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  const auto item = static_cast<std::size_t>(tensor.element_size());
  const std::size_t begin = static_cast<std::size_t>(tensor.storage_offset()) * item;
  std::size_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += static_cast<std::size_t>((tensor.size(dim) - 1) * tensor.stride(dim));
  }
  return {begin, begin + (last + 1) * item};
}

bool coversItsStorage(const at::Tensor& tensor) {
  return tensor.storage().nbytes() > 0 && extentOf(tensor) == Extent{0, tensor.storage().nbytes()};
}

Extent existingExtentOf(const at::Tensor& tensor) {
  const Extent extent = extentOf(tensor);
  TORCH_CHECK(
      extent.end <= tensor.storage().nbytes(), "offload: a tensor of shape ", tensor.sizes(), " needs ", extent.end,
      " bytes of its storage, which has ", tensor.storage().nbytes(), "; the storage was resized or freed.");
  return extent;
}

at::Tensor tensorOver(c10::Storage storage, c10::DeviceType type, const at::Tensor& like, std::int64_t storageOffset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keysOf(type), like.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(storageOffset);
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  compat::copyNames(result, like);
  return result;
}

at::Tensor hostAlias(const at::Tensor& offload) {
  existingExtentOf(offload);
  return tensorOver(hostAliasStorage(offload.storage()), c10::DeviceType::CPU, offload, offload.storage_offset());
}

c10::Storage hostAliasStorage(const c10::Storage& offload) {
  c10::DataPtr data(const_cast<void*>(offload.data()), c10::Device(c10::DeviceType::CPU));
  // Resizable: an operation may give an `out=` tensor other memory, which runOnHost() then copies from.
  return {c10::Storage::use_byte_size_t(), offload.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true};
}

at::Tensor emptyOffload(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device, Born born, Purpose purpose) {
  const std::size_t bytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(type));
  return offloadTensor(Context::get().newBlock(bytes, withIndex(device).index(), born, purpose), sizes, strides, type);
}

at::Tensor offloadTensor(c10::DataPtr data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  const auto meta = c10::scalarTypeToTypeMeta(type);
  const std::size_t bytes = at::detail::computeStorageNbytes(sizes, strides, meta.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), offloadAllocator(), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keysOf(kOffload), meta);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return result;
}

ModeOfWritten::ModeOfWritten(const at::Tensor& written) {
  if (!c10::InferenceMode::is_enabled() || written.is_inference()) return;
  inference_.emplace(false);
  noGrad_.emplace();
}

void shareVersionCounter(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_inference() || to.is_inference()) return;
  to.unsafeGetTensorImpl()->set_version_counter(from.unsafeGetTensorImpl()->version_counter());
}

c10::DeviceIndex currentIndex() noexcept {
  return theCurrentIndex;
}

void setCurrentIndex(c10::DeviceIndex index) noexcept {
  theCurrentIndex = index;
}

c10::Device withIndex(c10::Device device) {
  if (!device.has_index()) return {device.type(), theCurrentIndex};
  TORCH_CHECK(
      device.index() < deviceCount(), "offload: there is no device ", device, "; this machine has ",
      static_cast<int>(deviceCount()), ", named offload:0 to offload:", static_cast<int>(deviceCount()) - 1,
      " (one for each CUDA device, at least one).");
  return device;
}

void resizeStorage(c10::StorageImpl& storage, std::size_t bytes) {
  const c10::Device device = storage.device();
  Block* const old = storage.nbytes() > 0 ? &blockOf(storage) : nullptr;
  TORCH_CHECK(
      old == nullptr || !old->shared, "offload: a storage of ", storage.nbytes(),
      " bytes is shared between processes and can't be resized to ", bytes, "; resize a clone() of the tensor.");
  Context& context = Context::get();
  c10::DataPtr data = old != nullptr ? context.newBlock(bytes, device.index(), old->born, old->purpose)
                                     : context.newBlock(bytes, device.index(), Born::Host);
  if (old != nullptr && bytes > 0) {
    HostLease from = context.lease(*old, Access::Read);
    HostLease to = context.lease(*static_cast<Block*>(data.get_context()), Access::Write);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

HostLease leaseOf(const at::Tensor& offload, Access access) {
  const auto& storage = offload.storage();
  if (storage.nbytes() == 0) return {};
  refuseHostAccessInCapture(offload.device().index());
  return Context::get().lease(blockOf(storage), access);
}

c10::Allocator* offloadAllocator() {
  static OffloadAllocator* instance = new OffloadAllocator();
  return instance;
}

} // namespace offload
