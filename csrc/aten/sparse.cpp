#include "aten/sparse.h"

#include "aten/fetch.h"
#include "aten/placement.h"

#include <ATen/ExpandUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <c10/core/DeviceGuard.h>

namespace offload {
namespace {

at::SparseTensorImpl& implOf(const at::Tensor& sparse) {
  return *static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl());
}

const Block* blockOfPart(const at::Tensor& part) {
  return part.storage().nbytes() > 0 ? &blockOf(part.storage()) : nullptr;
}

// In the place of `old`.
at::Tensor newPart(const at::Tensor& value, const at::Tensor& old, Born born, Purpose purpose, c10::Device computed) {
  const Block* const before = blockOfPart(old);
  if (before != nullptr) purpose = before->purpose;
  const void* const of = before == nullptr ? nullptr : before->derivedFrom;
  if (born == Born::Device && isCached(computed) && value.scalar_type() == old.scalar_type()) {
    return isOwnPart(value) ? stashResult(value, old.device(), computed, purpose, of)
                            : stashCopy(value, old.device(), computed, purpose, of);
  }
  const auto strides = at::infer_dense_strides(value.sizes(), value.strides());
  auto part = emptyOffload(value.sizes(), strides, old.scalar_type(), old.device(), born, purpose);
  part.copy_(value);
  return part;
}

// Whether an operation has kept a part of its operand: has written to it, if at all.
bool isKept(const at::Tensor& now, const at::Tensor& given, const at::Tensor& part) {
  return now.storage().unsafeGetStorageImpl() == given.storage().unsafeGetStorageImpl() && now.sizes() == part.sizes();
}

bool isAlias(const at::Tensor& now, const at::Tensor& part) {
  return now.storage().data() == part.storage().data() && now.strides() == part.strides() &&
      now.storage_offset() == part.storage_offset();
}

void replaceParts(const at::Tensor& sparse, const SparseParts& parts, const at::Tensor& like) {
  auto& impl = implOf(sparse);
  const auto& shape = implOf(like);
  impl.raw_resize_(shape.sparse_dim(), shape.dense_dim(), like.sizes());
  impl.set_indices_and_values_unsafe(parts.indices, parts.values);
  impl.set_coalesced(shape.coalesced());
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

bool isOwnPart(const at::Tensor& part, std::size_t references) {
  return part.storage().use_count() == 1 && part.use_count() == references; // detach() shares the parts themselves
}

void putParts(
    const at::Tensor& sparse, const at::Tensor& work, const SparseParts& given, c10::Device computed, Purpose purpose) {
  const auto own = partsOf(sparse);
  const auto now = partsOf(work);
  const Born born = isBornOnDevice(sparse) ? Born::Device : Born::Host;
  bool replaced = work.sizes() != sparse.sizes() || implOf(work).coalesced() != implOf(sparse).coalesced();
  const auto put = [&](const at::Tensor& part, const at::Tensor& made, const at::Tensor& before) {
    if (!isKept(made, before, part)) {
      replaced = true;
      return newPart(made, part, born, purpose, computed);
    }
    if (made.numel() == 0 || isAlias(made, part)) return part;
    if (!isOwnPart(made, 3) || !replaceValue(part, made, computed)) part.copy_(made);
    return part;
  };
  const SparseParts parts{put(own.indices, now.indices, given.indices), put(own.values, now.values, given.values)};
  if (replaced) replaceParts(sparse, parts, work);
}

void copyParts(const at::Tensor& sparse, const at::Tensor& from) {
  if (sparse.is_same(from)) return;
  const auto own = partsOf(sparse);
  const auto other = partsOf(from);
  // Into an empty one, as all are first that `to()` makes, it is a move to offload.
  const Born born = own.values.numel() > 0 && isBornOnDevice(sparse) ? Born::Device : Born::Host;
  const auto copy = [&](const at::Tensor& value, const at::Tensor& old) {
    return newPart(value, old, born, Purpose::Temporary, c10::Device(c10::kCPU));
  };
  replaceParts(sparse, {copy(other.indices, own.indices), copy(other.values, own.values)}, from);
}

} // namespace offload
