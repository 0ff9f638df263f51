#include "aten/sparse.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <c10/core/DeviceGuard.h>

namespace offload {
namespace {

at::SparseTensorImpl& implOf(const at::Tensor& sparse) {
  return *static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl());
}

} // namespace

bool isSparse(const at::Tensor& tensor) {
  return tensor.is_sparse() && dynamic_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl()) != nullptr;
}

SparseParts partsOf(const at::Tensor& sparse) {
  const auto& impl = implOf(sparse);
  return {impl.indices(), impl.values()};
}

at::Tensor sparseOf(const SparseParts& parts, const at::Tensor& like) {
  const auto& impl = implOf(like);
  const c10::Device device = parts.values.device();
  const c10::DeviceGuard guard(device); // PyTorch first makes one without elements, on the current device
  return at::native::new_with_dims_and_tensor_sparse_symint(
      impl.sparse_dim(), impl.dense_dim(), like.sym_sizes(), parts.indices, parts.values, parts.values.scalar_type(),
      at::kSparse, device, std::nullopt, impl.coalesced());
}

void replaceParts(const at::Tensor& sparse, const SparseParts& parts, const at::Tensor& like) {
  auto& impl = implOf(sparse);
  const auto& shape = implOf(like);
  impl.raw_resize_(shape.sparse_dim(), shape.dense_dim(), like.sizes());
  impl.set_indices_and_values_unsafe(parts.indices, parts.values);
  impl.set_coalesced(shape.coalesced());
}

} // namespace offload
