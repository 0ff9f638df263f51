#include "autograd/written.h"

#include "aten/fetch.h"
#include "autograd/nodes.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace offload {
namespace {

using c10::DispatchKey;

// One of all elements that lie at the same place, as those of an expanded tensor do. A size that a graph leaves open is more than 1.
at::Tensor unexpanded(at::Tensor tensor, c10::SymIntArrayRef strides) {
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (strides[dim].maybe_as_int() == 0 && tensor.sym_size(dim).maybe_as_int().value_or(2) > 1) {
      tensor = tensor.narrow(dim, 0, 1);
    }
  }
  return tensor;
}

// More than bytes, that are given away with them: a tangent, or a level of functorch's.
bool hasMore(const at::Tensor& tensor) {
  return tensor.key_set().has(DispatchKey::FuncTorchGradWrapper) || tensor._fw_grad(0).defined();
}

} // namespace

at::Tensor workFor(const at::Tensor& value, const at::Tensor& source) {
  const ModeOfWritten mode(source);
  if (value.is_sparse()) return value.clone();
  const at::Tensor one = unexpanded(value, value.sym_strides());
  if (tracing() || !overlapsItself(one)) {
    return one.is_same(value) ? value.clone() : one.clone().expand_symint(value.sym_sizes());
  }
  const auto reach = static_cast<std::int64_t>(at::detail::computeStorageNbytes(one.sizes(), one.strides(), 1));
  return one.as_strided({reach}, {1}).clone().as_strided(value.sizes(), value.strides(), 0);
}

bool isOverwritten(const OpTraits& traits, const Placement& placement, const at::Tensor& offload) {
  return traits.fills && placement.toOffload && isCached(placement.compute) && !tracing() && !isSparse(offload) &&
      offload.is_non_overlapping_and_dense() && coversItsStorage(offload) && !offload.is_conj() && !offload.is_neg();
}

at::Tensor emptyAs(const at::Tensor& offload, c10::Device device) {
  const ModeOfWritten mode(offload);
  if (device.is_cpu()) device = c10::kCPU; // whose index is the cache's alone
  return at::empty_strided(offload.sizes(), offload.strides(), offload.options().device(device));
}

bool anyHasMore(const OpTraits& traits, torch::jit::Stack& stack) {
  bool any = false;
  replaceTensors(traits, stack, [&any](const at::Tensor& tensor, const ArgumentTraits& /*argument*/) {
    any = any || hasMore(tensor);
    return at::Tensor();
  });
  return any;
}

void copyBack(const Written& written, c10::Device computed) {
  // A kernel that bumps versions by itself (list operations) has bumped the copy's. Where the copy's tensor carries a version that
  // the dispatcher has given it, above autograd, so has the write that follows here.
  const bool aboveAutograd = !c10::impl::tls_is_dispatch_key_excluded(DispatchKey::AutogradFunctionality);
  auto* source = written.source.unsafeGetTensorImpl();
  const bool counts = !written.source.is_inference() && !written.work.is_inference();
  const bool bumped = counts && written.work._version() > 0;
  // What the schema hides is no write to autograd either: no history.
  std::optional<at::AutoDispatchBelowADInplaceOrView> below;
  if (written.argument.hidden) below.emplace();
  const bool recorded = recordsGraph() && (written.source.requires_grad() || written.work.requires_grad());
  const bool sparse = written.parts.values.defined();
  const auto putAll = [&] { putParts(written.source, written.work, written.parts, computed, purposeOfResult()); };
  if (sparse && !recorded) {
    const at::AutoDispatchBelowADInplaceOrView writing;
    putAll();
    if (bumped) source->bump_version();
    return;
  }
  // Not only of `out=`: statistics of quantisation get their size when there are channels to count.
  if (written.source.sym_sizes() != written.work.sym_sizes() && !sparse) {
    std::optional<at::AutoDispatchBelowADInplaceOrView> resizing; // which autograd refuses of a leaf
    if (!recorded && !tracing()) resizing.emplace();
    written.source.resize_(written.work.sizes());
    if (written.work.is_non_overlapping_and_dense()) written.source.as_strided_(written.work.sizes(), written.work.strides());
  }
  const bool bytesAlone = !tracing() && !hasMore(written.source) && !hasMore(written.work);
  const bool replaced = !recorded && bytesAlone && replaceValue(written.source, written.work, computed);
  const auto write = [&] {
    if (sparse) {
      putAll();
    } else {
      written.source.copy_(written.work);
    }
  };
  if (!replaced && !rewrite(written.source, written.work, computed, write)) {
    if (sparse) {
      written.source.copy_(written.work);
      return;
    }
    const auto strides = written.source.sym_strides();
    unexpanded(written.source, strides).copy_(unexpanded(written.work, strides));
  }
  if (bumped && (replaced || !aboveAutograd || written.argument.hidden)) source->bump_version();
}

void keepWritten(const Written& written, c10::Device computed) noexcept {
  try {
    if (written.argument.hidden || written.work._version() > 0) copyBack(written, computed);
  } catch (...) {
    // What ended the operation is what the caller is told.
  }
}

} // namespace offload
