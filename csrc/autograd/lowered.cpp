#include "autograd/lowered.h"

#include "aten/autocast_copies.h"
#include "aten/fetch.h"
#include "aten/placement.h"
#include "aten/tensors.h"
#include "autograd/nodes.h"
#include "compat/node_pointers.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>

namespace offload {
namespace {

// A tensor that is another one in every region: the cast that autocast itself keeps of a parameter of ours. Where the cache is off
// it is another one each time.
at::Tensor currentRegion() {
  const c10::impl::ExcludeDispatchKeyGuard modes(c10::python_ks);
  const c10::impl::ExcludeDispatchKeyGuard autocast(c10::autocast_dispatch_keyset);
  static auto* const parameter = new at::Tensor(at::zeros({}).requires_grad_());
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), *parameter, at::kCPU);
}

// The nodes of the casts of a region. Weak, as a node keeps its parameter alive: a graph that is gone needs no common node.
class Casts {
 public:
  compat::NodePointer find(const at::Tensor& parameter, c10::Device target, at::ScalarType dtype) {
    const at::Tensor region = currentRegion();
    std::lock_guard lock(mutex_);
    if (!region_.is_same(region)) nodes_.clear();
    region_ = region;
    const auto found = nodes_.find(parameter.unsafeGetTensorImpl());
    if (found == nodes_.end() || found->second.target != target || found->second.dtype != dtype) return {};
    auto node = found->second.node.lock();
    if (!node) return {};
    // The address may be another parameter's by now.
    const auto& source = found->second.ofCopy ? node->next_edge(0) : node->next_edge(0).function->next_edge(0);
    return source == torch::autograd::impl::gradient_edge(parameter) ? node : compat::NodePointer();
  }

  void add(const at::Tensor& parameter, c10::Device target, const at::Tensor& cast, bool ofCopy) {
    std::lock_guard lock(mutex_);
    nodes_[parameter.unsafeGetTensorImpl()] = Cast{compat::WeakNode(cast.grad_fn()), target, cast.scalar_type(), ofCopy};
  }

 private:
  struct Cast {
    compat::WeakNode node;
    c10::Device target = c10::kCPU;
    at::ScalarType dtype = at::kFloat;
    bool ofCopy = false; // then it is one node, otherwise that of a fetch and that of a cast
  };
  std::mutex mutex_;
  at::Tensor region_;
  std::unordered_map<const c10::TensorImpl*, Cast> nodes_;
};

Casts& casts() {
  static auto* instance = new Casts();
  return *instance;
}

// Of which PyTorch keeps the cast.
bool isKept(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view() &&
      !tensor.is_inference() && at::autocast::is_autocast_cache_enabled() && at::GradMode::is_enabled() &&
      !tensor._fw_grad(0).defined();
}

// Where a fetch gives a tensor with one gradient, and no tangent.
bool hasOneGradient(const at::Tensor& tensor) {
  return !tensor._fw_grad(0).defined() &&
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

} // namespace

std::optional<at::ScalarType> loweredTo(const OpTraits& traits, c10::DeviceType device) {
  const bool lowers = device == c10::kCUDA ? traits.lowersOnCuda : device == c10::kCPU && traits.lowersOnCpu;
  if (!lowers || tracing() || !at::autocast::is_autocast_enabled(device)) return {};
  return at::autocast::get_autocast_dtype(device);
}

bool needsLowering(const at::Tensor& operand, at::ScalarType dtype) {
  if (operand.is_sparse() || !operand.is_floating_point() || operand.scalar_type() == at::kDouble ||
      operand.scalar_type() == dtype)
    return false;
  return isKept(operand) || !isBornOnDevice(operand); // of an activation the cast stays for backward, or it would itself
}

at::Tensor fetchLowered(const at::Tensor& offload, c10::Device target, at::ScalarType dtype) {
  const bool kept = isKept(offload);
  const auto node = kept ? casts().find(offload, target, dtype) : compat::NodePointer();
  at::Tensor cast = hasOneGradient(offload) ? fetchCopy(offload, target, dtype) : at::Tensor();
  const bool ofCopy = cast.defined();
  if (!ofCopy) {
    const at::AutoGradMode mode(at::GradMode::is_enabled() && !node);
    cast = fetch(offload, target).to(dtype);
    makeCopy(offload, target, dtype);
  }
  // What is emptied for a while must tell when its source has changed.
  if (isCached(target)) shareVersionCounter(offload, cast);
  if (node) torch::autograd::impl::set_gradient_edge(cast, torch::autograd::Edge(node, 0));
  if (!node && ofCopy) recordFetch(offload, cast, target);
  if (kept && !node) casts().add(offload, target, cast, ofCopy);
  return cast;
}

} // namespace offload
