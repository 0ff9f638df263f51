#include "aten/host_kernel.h"

#include "aten/generator.h"
#include "aten/host_update.h"
#include "aten/sparse.h"
#include "aten/tensors.h"

#include <unordered_map>

namespace offload {
namespace {

// The aliases of one call. Tensors of one storage share an alias of it, and a tensor that is given twice is given twice.
class Aliases {
 public:
  // All leases first: one Block may be read by one operand and written by another.
  void take(const OpTraits& traits, torch::jit::Stack& stack) {
    std::unordered_map<const c10::StorageImpl*, std::pair<at::Tensor, bool>> storages;
    replaceTensors(traits, stack, [&](const at::Tensor& tensor, const ArgumentTraits& argument) {
      const auto add = [&](const at::Tensor& dense) {
        auto& entry = storages[dense.storage().unsafeGetStorageImpl()];
        entry.first = dense;
        entry.second = entry.second || argument.written || argument.hidden;
      };
      if (isOffload(tensor)) visitDense(tensor, add);
      return at::Tensor();
    });
    for (const auto& [storage, entry] : storages) {
      leases_.push_back(leaseOf(entry.first, entry.second ? Access::Write : Access::Read));
    }
  }

  at::Tensor of(const at::Tensor& tensor) {
    auto& alias = tensors_[tensor.unsafeGetTensorImpl()];
    if (!alias.defined()) {
      const ModeOfWritten mode(tensor);
      if (isSparse(tensor)) {
        const auto [indices, values] = partsOf(tensor);
        alias = sparseOf({ofDense(indices), ofDense(values)}, tensor);
      } else {
        alias = ofDense(tensor);
      }
      // List operations bump the versions of what they write to by themselves.
      shareVersionCounter(tensor, alias);
      sources_.push_back(tensor);
    }
    return alias;
  }

  void release() {
    leases_.clear();
  }

 private:
  at::Tensor ofDense(const at::Tensor& tensor) {
    existingExtentOf(tensor);
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) found = storages_.emplace(key, hostAliasStorage(tensor.storage())).first;
    return tensorOver(found->second, c10::kCPU, tensor, tensor.storage_offset());
  }

  std::vector<at::Tensor> sources_; // of which the stack may have been the only owner
  std::vector<HostLease> leases_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> tensors_;
};

/// An operand that is written to, and what the operation is given for it.
struct Written {
  at::Tensor source;
  at::Tensor alias;
  SparseParts parts; // of a sparse alias
};

// An operation may have resized what it was given as `out=`, or have written its conjugate there and said so, as solvers do.
void adoptShape(const at::Tensor& source, const at::Tensor& alias) {
  if (alias.is_conj() != source.is_conj()) source._set_conj(alias.is_conj());
  if (alias.is_neg() != source.is_neg()) source._set_neg(alias.is_neg());
  const bool moved = alias.storage().data() != source.storage().data();
  if (!moved && alias.sizes() == source.sizes() && alias.strides() == source.strides()) return;
  source.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
  if (!moved) return;
  auto* storage = source.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < alias.storage().nbytes()) resizeStorage(*storage, alias.storage().nbytes());
  HostLease write = leaseOf(source, Access::Write);
  hostAlias(source).copy_(alias);
}

} // namespace

void runOnHost(
    const c10::OperatorHandle& op, const OpTraits& traits, torch::jit::Stack& stack,
    const std::function<at::Tensor(const at::Tensor&)>& stash) {
  if (updateOnHost(op, traits, stack)) return;
  std::vector<Written> written;
  Aliases aliases;
  aliases.take(traits, stack);
  replaceTensors(traits, stack, [&](const at::Tensor& tensor, const ArgumentTraits& argument) -> at::Tensor {
    if (tensor.is_cuda()) return tensor.cpu();
    if (!isOffload(tensor)) return {};
    auto alias = aliases.of(tensor);
    if (argument.written) written.push_back({tensor, alias, isSparse(alias) ? partsOf(alias) : SparseParts()});
    return alias;
  });
  useArgumentsOf(c10::kCPU, traits, stack);
  op.callBoxed(&stack);
  aliases.release();
  for (const auto& [source, alias, parts] : written) {
    if (isSparse(source)) {
      putParts(source, alias, parts, c10::Device(c10::kCPU), Purpose::Temporary);
    } else {
      adoptShape(source, alias);
    }
  }
  replaceResults(traits.results, stack, [&](const at::Tensor& result) {
    for (const auto& target : written) {
      if (result.is_same(target.alias)) return target.source;
    }
    return stash(result);
  });
}

void useArgumentsOf(c10::DeviceType type, const OpTraits& traits, torch::jit::Stack& stack) {
  const std::size_t base = stack.size() - traits.arguments.size();
  for (std::size_t k = 0; k < traits.arguments.size(); ++k) {
    auto& value = stack[base + k];
    if (traits.arguments[k].kind == ArgumentKind::Generator && value.isGenerator()) {
      if (type == c10::kCPU) value = hostGenerator(value.toGenerator());
    } else if (traits.arguments[k].kind == ArgumentKind::Device && value.isDevice() && value.toDevice().type() == kOffload) {
      value = type == c10::kCPU ? c10::Device(type) : c10::Device(type, value.toDevice().index());
    }
  }
}

} // namespace offload
