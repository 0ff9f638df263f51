// Tensors over memory of ours: what fetch, stash, factories and views are made of.
#pragma once

#include "aten/context.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace offload {

inline bool isOffload(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.device().type() == kOffload;
}

/// The bytes of its storage that a strided tensor covers.
Extent extentOf(const at::Tensor& tensor);
/// The same, with an error where the storage doesn't have them: it was resized or freed.
Extent existingExtentOf(const at::Tensor& tensor);
/// Whether a tensor's bytes are all that its storage has, and there are some.
bool coversItsStorage(const at::Tensor& tensor);

/// A tensor of `like`'s dtype, sizes, strides and conjugate and negative bits over other memory.
at::Tensor tensorOver(c10::Storage storage, c10::DeviceType type, const at::Tensor& like, std::int64_t storageOffset);

/// The same host bytes as a CPU tensor, without a copy. The caller holds the lease, and the tensor, for as long as it is used.
at::Tensor hostAlias(const at::Tensor& offload);
/// The CPU storage of such tensors; those of one storage should share it, so that PyTorch sees where they overlap.
c10::Storage hostAliasStorage(const c10::Storage& offload);

/// An uninitialized tensor on `device`.
at::Tensor emptyOffload(
    at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device, Born born,
    Purpose purpose = Purpose::Temporary);

/// A tensor that is all of a Block's memory.
at::Tensor offloadTensor(c10::DataPtr data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

/// While it lives, tensors are made that count writes as one that is written to does: in inference mode too, where that isn't of it.
class ModeOfWritten {
 public:
  explicit ModeOfWritten(const at::Tensor& written);

 private:
  std::optional<c10::InferenceMode> inference_;
  std::optional<at::NoGradGuard> noGrad_; // which leaving inference mode would end
};

/// Lets an in-place write to either tensor be seen by what autograd saved of the other.
void shareVersionCounter(const at::Tensor& from, const at::Tensor& to);

/// The index that "offload" stands for on this thread.
c10::DeviceIndex currentIndex() noexcept;
void setCurrentIndex(c10::DeviceIndex index) noexcept;
/// The device with its index: the current one where it is left out, checked otherwise.
c10::Device withIndex(c10::Device device);

c10::Allocator* offloadAllocator();

/// Gives a storage other memory of `bytes` bytes and copies over what fits. Tensors of the storage keep their sizes.
void resizeStorage(c10::StorageImpl& storage, std::size_t bytes);

/// A lease on the bytes of a tensor's storage; an empty one for a storage without bytes.
HostLease leaseOf(const at::Tensor& offload, Access access);

} // namespace offload
