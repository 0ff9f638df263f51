// Copies between offload and every other device, with conversion and any strides.
//
// Note [Where a copy converts]
// Between a compute device and offload the conversion is done on the compute device, so that the host neither computes nor
// waits: the bytes that travel have the dtype and the strides of the offload side. Only an offload target with gaps or overlaps
// between its elements needs the host, because a copy home writes whole ranges of bytes. Between offload tensors it is done where the
// target was born, if all of that is written.
#include "aten/fetch.h"
#include "aten/placement.h"
#include "compat/registration.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_strided.h>

namespace offload {
namespace {

// Whether a tensor's elements fill one range of bytes, each once.
bool fillsRange(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense();
}

void copyHome(const at::Tensor& from, const at::Tensor& to) {
  at::Tensor value = from;
  const bool sameBytes = value.scalar_type() == to.scalar_type() && value.sizes() == to.sizes() &&
      value.strides() == to.strides() && value.is_conj() == to.is_conj() && value.is_neg() == to.is_neg();
  if (!sameBytes) {
    value = at::empty_strided(to.sizes(), to.strides(), from.options().dtype(to.dtype()));
    if (to.is_conj()) value._set_conj(true);
    if (to.is_neg()) value._set_neg(true);
    value.copy_(from);
  }
  Context& context = Context::get();
  const Stream stream = context.currentStream(value.is_cuda() ? value.device().index() : 0);
  context.residency().store(blockOf(to.storage()), extentOf(to), value.const_data_ptr(), stream);
}

void copyOnHost(const at::Tensor& from, const at::Tensor& to) {
  HostLease write = isOffload(to) ? leaseOf(to, Access::Write) : HostLease();
  const bool shared = isOffload(from) && isOffload(to) && from.storage().is_alias_of(to.storage());
  HostLease read = isOffload(from) && !shared ? leaseOf(from, Access::Read) : HostLease();
  if (shared) {
    // Over one storage, so that PyTorch sees where they overlap.
    const c10::Storage storage = hostAliasStorage(to.storage());
    const auto alias = [&storage](const at::Tensor& of) { return tensorOver(storage, c10::kCPU, of, of.storage_offset()); };
    alias(to).copy_(alias(from));
    return;
  }
  const at::Tensor target = isOffload(to) ? hostAlias(to) : to;
  target.copy_(isOffload(from) ? hostAlias(from) : from);
}

// Whether a tensor is where what is stored in `offload` computes.
bool isThere(const at::Tensor& tensor, c10::Device offload) {
  if (isOffload(tensor)) return tensor.device() == offload;
  const bool plays = Context::get().backend() == Backend::Sim && tensor.is_cpu(); // CUDA's part
  return plays || tensor.device() == pairedDevice(offload.index());
}

// What becomes the value of a tensor that was born on the device is made there, as all that is written to it is; a part of one that is
// in the cache, too, or all of it would go home for the write and come back.
bool copyThere(const at::Tensor& from, const at::Tensor& to) {
  const c10::Device device = pairedDevice(to.device().index());
  if (!isCached(device) || HostScope::active() || !isThere(from, to.device()) || to.is_conj() || to.is_neg() ||
      to.storage().nbytes() == 0 || from.storage().is_alias_of(to.storage()) || blockOf(to.storage()).born != Born::Device) {
    return false;
  }
  try {
    const bool whole = coversItsStorage(to) && fillsRange(to);
    if (!isOffload(from)) return !whole && changePart(to, from, device);
    const at::Tensor fetched = fetchTo(from, device);
    if (!whole) return changePart(to, fetched, device);
    at::Tensor value = at::empty_strided(to.sizes(), to.strides(), fetched.options().dtype(to.dtype()));
    value.copy_(fetched);
    return replaceValue(to, value, device);
  } catch (const c10::OutOfMemoryError&) {
    return false; // the host has room for it already
  }
}

at::Tensor copyFrom(const at::Tensor& self, const at::Tensor& to, bool /*nonBlocking*/) {
  if (to.numel() == 0) {
    TORCH_CHECK(
        at::is_expandable_to(self.sizes(), to.sizes()), "offload: a tensor of shape ", self.sizes(),
        " can't be copied into one of shape ", to.sizes(), ".");
    return to;
  }
  if (isOffload(to) && isUndecided(to)) {
    const bool there =
        isOffload(self) && isBornOnDevice(self) && !HostScope::active() && isCached(pairedDevice(to.device().index()));
    decideBirth(to, there ? Born::Device : Born::Host);
  }
  if (isOffload(to) && copyThere(self, to)) return to;
  if (isOffload(self) && to.is_cuda()) {
    const_cast<at::Tensor&>(to).copy_(fetchTo(self, to.device()));
  } else if (self.is_cuda()) {
    if (fillsRange(to)) {
      copyHome(self, to);
    } else {
      copyOnHost(stashCopy(self.contiguous(), to.device(), self.device()), to);
    }
  } else {
    TORCH_CHECK(
        (isOffload(self) || self.is_cpu()) && (isOffload(to) || to.is_cpu()), "offload: can't copy from ", self.device(),
        " to ", to.device(), "; copy through the CPU.");
    copyOnHost(self, to);
  }
  return to;
}

at::Tensor copyFromAndResize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copyFrom(self, to, false);
}

at::Scalar localScalarDense(const at::Tensor& self) {
  HostLease read = leaseOf(self, Access::Read);
  return at::_local_scalar_dense(hostAlias(self));
}

} // namespace

// A copy writes through its target's conjugate and negative bits; resolved first, the target would be a copy of itself.
OFFLOAD_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

OFFLOAD_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

OFFLOAD_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copyFrom);
  m.impl("_copy_from_and_resize", copyFromAndResize);
  m.impl("_local_scalar_dense", localScalarDense);
}

} // namespace offload
