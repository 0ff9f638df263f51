// What sparse offload tensors are made of and give away: PyTorch's own kernels, which only handle their parts.
#include "aten/sparse.h"
#include "aten/tensors.h"
#include "compat/registration.h"

#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_dimI_native.h>
#include <ATen/ops/_dimV_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_broadcast_to_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/permute_native.h>
#include <ATen/ops/resize_as_sparse_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/unsqueeze_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/DeviceGuard.h>

namespace offload {
namespace {

std::optional<c10::Device> deviceOf(const at::Tensor& tensor) {
  return tensor.device();
}
std::optional<c10::Device> deviceOf(std::optional<c10::Device> device) {
  return device ? withIndex(*device) : device;
}
template <class Other>
std::optional<c10::Device> deviceOf(const Other& /*other*/) {
  return {};
}

// Of a kernel that makes a sparse tensor, which begins as one without elements on the current device: that is the one that the first
// argument with a device names.
template <auto kernel>
struct OnItsDevice;
template <class Result, class... Arguments, Result (*kernel)(Arguments...)>
struct OnItsDevice<kernel> {
  static Result call(Arguments... arguments) {
    std::optional<c10::Device> device;
    ((device = device ? device : deviceOf(arguments)), ...);
    const c10::OptionalDeviceGuard guard(device);
    return kernel(std::forward<Arguments>(arguments)...);
  }
};

at::Tensor& copySparse(at::Tensor& self, const at::Tensor& from, bool nonBlocking) {
  if (!isOffload(self)) return at::native::copy_sparse_(self, from, nonBlocking);
  copyParts(self, from);
  return self;
}

template <auto kernel>
auto onItsDevice() {
  return &OnItsDevice<kernel>::call;
}

} // namespace

OFFLOAD_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", onItsDevice<&at::native::new_with_dims_sparse>());
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", onItsDevice<&at::native::new_with_dims_and_tensor_sparse_symint>());
  m.impl("empty.memory_format", onItsDevice<&at::native::empty_sparse_symint>());
  m.impl("empty_like", onItsDevice<&at::native::empty_like_sparse_coo>());
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_dimI", at::native::sparse_dim_sparse);
  m.impl("_dimV", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("copy_", onItsDevice<&at::native::copy_sparse_wrapper_>());
  m.impl("copy_sparse_to_sparse_", onItsDevice<&copySparse>());
  m.impl("sparse_resize_", onItsDevice<&at::native::sparse_resize_>());
  m.impl("sparse_resize_and_clear_", onItsDevice<&at::native::sparse_resize_and_clear_>());
  m.impl("resize_as_sparse_", onItsDevice<&at::native::resize_as_sparse_>());
  m.impl("permute", onItsDevice<&at::native::permute_sparse_coo>());
  m.impl("unsqueeze", onItsDevice<&at::native::unsqueeze_sparse>());
  m.impl("_sparse_broadcast_to", onItsDevice<&at::native::sparse_broadcast_to>());
}

} // namespace offload
