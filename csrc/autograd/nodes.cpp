#include "autograd/nodes.h"

#include "aten/fetch.h"
#include "aten/placement.h"
#include "aten/sparse.h"
#include "autograd/gapped_clone.h"
#include "compat/named_tensors.h"
#include "compat/node_pointers.h"
#include "compat/registration.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <optional>
#include <utility>

namespace offload {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

at::Tensor callFetch(const at::Tensor& self, c10::Device target) {
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("offload::fetch", "").typed<at::Tensor(const at::Tensor&, c10::Device)>();
  return op.call(self, target);
}

at::Tensor callStash(const at::Tensor& self, c10::Device home) {
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("offload::stash", "").typed<at::Tensor(const at::Tensor&, c10::Device)>();
  return op.call(self, home);
}

// Whether nobody but the holder of `gradient` can write to its memory. The gradient of a transposed weight is a view, whose base
// then lives for the view's sake only.
bool isSoleOwner(const at::Tensor& gradient) {
  if (isSparse(gradient)) return gradient.use_count() == 1; // whose parts stashResult() asks
  if (gradient.use_count() != 1 || !gradient.has_storage() || isFetched(gradient)) return false;
  if (!gradient.is_view()) return gradient.storage().use_count() == 1;
  return gradient.storage().use_count() == 2 && gradient._base().use_count() == 1;
}

// Autograd runs the node with the highest number first. With the highest of all, as the sinks of gradients have, fetch and stash
// pass a gradient on the moment they get it: gradients meet, and hooks run, in the order that they have without offload.
constexpr std::uint64_t kAtOnce = UINT64_MAX;

struct MadeGradient {
  bool is = false;
  const void* of = nullptr; // see Block::derivedFrom
};
thread_local MadeGradient madeGradient;

// Within it what is stashed is a gradient, though grad mode is on.
struct BackwardScope {
  explicit BackwardScope(const void* gradientOf) : before(std::exchange(madeGradient, {true, gradientOf})) {}
  ~BackwardScope() {
    madeGradient = before;
  }
  const MadeGradient before;
};

// Tensors without memory of their own: the dispatcher leads to what is inside.
constexpr c10::DispatchKeySet kWithoutMemory{
    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched};

// Of a backward that records a graph the clones are part, and repeated elements can't be filled in there. Of one that is traced
// the compiler chooses the strides, and a batch tells other ones than its memory has.
bool hasGaps(const at::Tensor& gradient) {
  return !tracing() && !at::GradMode::is_enabled() && !gradient.is_sparse() && gradient.numel() > 0 &&
      !gradient._is_zerotensor() && !gradient.key_set().has_any(kWithoutMemory) && !gradient.is_non_overlapping_and_dense();
}

struct FetchBackward final : Node {
  FetchBackward() : Node(kAtOnce) {}
  c10::Device home{kOffload};
  c10::Device target{c10::kCPU};
  std::optional<at::ScalarType> castFrom; // the source's dtype, where its values had another one where they were fetched
  const void* source = nullptr; // see Block::derivedFrom

  variable_list apply(variable_list&& inputs) override {
    at::Tensor gradient = std::move(inputs[0]);
    inputs.clear();
    if (!gradient.defined() || !task_should_compute_output(0)) return {at::Tensor()};
    TORCH_CHECK(
        !tracing() || !gradient.is_sparse(), "offload: the gradient of an offload tensor of shape ", gradient.sizes(),
        " is sparse, and a compiled graph can't make it; leave sparse=True out of nn.Embedding and nn.EmbeddingBag, or keep "
        "that module out of the graph with torch.compiler.disable().");
    if (tracing()) return {callStash(gradient, home)};
    if (castFrom) gradient = gradient.to(*castFrom);
    if (sink() == nullptr && hasGaps(gradient)) gradient = cloneWithGaps(gradient);
    // A gradient that nobody else holds gives its memory away.
    if (!isSoleOwner(gradient) || torch::autograd::GradMode::is_enabled()) {
      const BackwardScope backward(becomesGradient() ? source : nullptr);
      return {callStash(gradient, home)};
    }
    return {stashResult(gradient, home, target, becomesGradient() ? Purpose::Gradient : Purpose::Temporary, source)};
  }

  // Or goes on to other operations, or is added to a gradient that there is.
  bool becomesGradient() const {
    return sink() != nullptr && !sink()->variable.grad().defined();
  }
  const torch::autograd::AccumulateGrad* sink() const {
    return dynamic_cast<const torch::autograd::AccumulateGrad*>(next_edge(0).function.get());
  }
  std::string name() const override {
    return "FetchBackward";
  }
};

struct StashBackward final : Node {
  StashBackward() : Node(kAtOnce) {}
  c10::Device target{c10::kCPU};

  variable_list apply(variable_list&& inputs) override {
    if (!inputs[0].defined() || !task_should_compute_output(0)) return {at::Tensor()};
    if (target.type() == kOffload) return {callStash(inputs[0], target)};
    at::Tensor gradient = callFetch(inputs[0], target);
    if (hasGaps(gradient)) return {cloneWithGaps(gradient)};
    // Autograd adds to a gradient in place, or keeps it, and a fetched one is everybody's: a copy, unless the tensor goes here.
    inputs.clear();
    at::Tensor own;
    if (!tracing() && !at::GradMode::is_enabled()) own = takeBack(gradient);
    return {own.defined() ? own : gradient.clone()};
  }
  std::string name() const override {
    return "StashBackward";
  }
};

bool needsNode(const at::Tensor& input) {
  return at::GradMode::is_enabled() && input.requires_grad();
}

template <class NodeType>
auto nodeFor(const at::Tensor& input) {
  auto node = compat::makeNode<NodeType>();
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  return node;
}

// PyTorch picks algorithms by it where no graph is recorded, too: matmul folds its batch.
void requireGradientAs(const at::Tensor& self, const at::Tensor& result) {
  if (self.requires_grad()) result.set_requires_grad(true);
}

// What was made in inference mode has no key of autograd's, and comes here at once. Outside of that mode it may have a gradient for all
// that, where an operation has other operands.
at::Tensor fetchPlain(const at::Tensor& self, c10::Device target) {
  at::Tensor result = fetchTo(self, target);
  if (self.is_inference() && recordsGraph()) recordFetch(self, result, target);
  if (c10::InferenceMode::is_enabled()) requireGradientAs(self, result);
  return result;
}

void connect(const at::Tensor& self, const at::Tensor& result, c10::Device target) {
  if (needsNode(self)) {
    recordFetch(self, result, target);
  } else {
    requireGradientAs(self, result);
  }
  if (const at::Tensor& tangent = self._fw_grad(0); tangent.defined()) {
    result._set_fw_grad(fetch(tangent, target), 0, false);
  }
}

at::Tensor fetchAutograd(const at::Tensor& self, c10::Device target) {
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    result = callFetch(self, target);
  }
  connect(self, result, target);
  return result;
}

void recordStash(const at::Tensor& input, const at::Tensor& result, c10::Device target) {
  auto node = nodeFor<StashBackward>(input);
  node->target = target;
  torch::autograd::set_history(result, node);
}

at::Tensor stashAutograd(const at::Tensor& self, c10::Device home) {
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    result = callStash(self, home);
  }
  if (needsNode(self)) recordStash(self, result, self.device());
  if (const at::Tensor& tangent = self._fw_grad(0); tangent.defined()) {
    result._set_fw_grad(callStash(tangent, home), 0, false);
  }
  return result;
}

} // namespace

// On the simulated link CPU tensors play CUDA's part.
c10::Device computedOn(const at::Tensor& result, c10::Device home) {
  if (result.device().type() == kOffload) return c10::Device(c10::kCPU);
  const bool simulated = result.is_cpu() && Context::get().backend() == Backend::Sim;
  return simulated ? pairedDevice(withIndex(home).index()) : result.device();
}

at::Tensor stashPlain(const at::Tensor& self, c10::Device home) {
  TORCH_CHECK(home.type() == kOffload, "offload: a result is stashed on an offload device, and not on ", home, ".");
  return stashCopy(self, home, computedOn(self, home), purposeOfResult(), madeGradient.of);
}

// A backward that records no graph makes gradients alone; one that does may also be computing a checkpoint's activations anew.
Purpose purposeOfResult() {
  if (HostScope::active()) return Purpose::Temporary;
  const bool backward = torch::autograd::get_current_graph_task_id() != -1 && !at::GradMode::is_enabled();
  return madeGradient.is || backward ? Purpose::Gradient : Purpose::Activation;
}

at::Tensor fetch(const at::Tensor& offload, c10::Device target) {
  return callFetch(offload, target);
}

namespace {

// Of what was fetched below autograd by a call that may come from anywhere.
void connectIfWanted(const at::Tensor& offload, const at::Tensor& result, c10::Device target) {
  if (c10::InferenceMode::is_enabled()) { // as of fetchPlain()
    requireGradientAs(offload, result);
  } else if (offload.is_inference()) {
    if (recordsGraph()) recordFetch(offload, result, target);
  } else if (!c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality)) {
    connect(offload, result, target);
  }
}

} // namespace

std::vector<at::Tensor> fetch(const std::vector<at::Tensor>& offload, c10::Device target) {
  std::vector<at::Tensor> results;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    results = fetchTo(offload, target);
  }
  for (std::size_t k = 0; k < offload.size(); ++k) connectIfWanted(offload[k], results[k], target);
  return results;
}

at::Tensor lookUp(const at::Tensor& offload, c10::Device target, std::size_t reads) {
  // While functorch transforms, levels are its affair.
  if (tracing() || c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return {};
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    result = readInPlace(offload, target, reads);
  }
  if (result.defined()) connectIfWanted(offload, result, target);
  return result;
}

namespace {

auto backwardOfFetch(const at::Tensor& offload, c10::Device target) {
  auto node = nodeFor<FetchBackward>(offload);
  node->home = offload.device();
  node->target = target;
  if (!tracing() && !isWrapper(offload) && offload.has_storage() && offload.storage().nbytes() > 0) {
    const auto offset = offload.storage_offset() * static_cast<std::int64_t>(offload.element_size());
    node->source = static_cast<const std::byte*>(blockOf(offload.storage()).data) + offset;
  }
  return node;
}

} // namespace

at::Tensor withGradientFrom(const at::Tensor& offload, c10::Device computed) {
  at::Tensor same = offload.detach();
  auto node = backwardOfFetch(offload, computed);
  const auto options = offload.options().device(computed.is_cpu() ? c10::Device(c10::kCPU) : computed);
  const auto input = node->add_input_metadata(at::empty({}, options).expand_symint(offload.sym_sizes()));
  torch::autograd::impl::set_gradient_edge(same, {std::move(node), input});
  return same;
}

void recordFetch(const at::Tensor& offload, const at::Tensor& fetched, c10::Device target) {
  if (!needsNode(offload)) return;
  auto node = backwardOfFetch(offload, target);
  if (fetched.scalar_type() != offload.scalar_type()) node->castFrom = offload.scalar_type();
  torch::autograd::set_history(fetched, node);
}

at::Tensor stash(const at::Tensor& result, c10::Device home, c10::Device computed) {
  if (tracing() || result.key_set().has_any(kWithoutMemory)) return callStash(result, home);
  at::Tensor stashed;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    stashed = stashResult(result, home, computed, purposeOfResult());
  }
  if (recordsGraph() && result.requires_grad()) recordStash(result, stashed, computed);
  if (const at::Tensor& tangent = result._fw_grad(0); tangent.defined()) {
    stashed._set_fw_grad(stash(tangent, home, computed), 0, false);
  }
  return stashed;
}

namespace {

// The rest of a view's base has history too, and tangents and wrappers are copy_'s own business.
bool canTakeHistory(const at::Tensor& offload, const at::Tensor& work) {
  const bool plain = !offload.is_view() && !tracing() && !offload.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
  return plain && recordsGraph() && work.requires_grad() && !work._fw_grad(0).defined();
}

void takeHistory(const at::Tensor& offload, const at::Tensor& work, c10::Device computed) {
  auto node = nodeFor<StashBackward>(work);
  node->target = computed;
  torch::autograd::rebase_history(offload, std::move(node));
}

} // namespace

bool rewrite(const at::Tensor& offload, const at::Tensor& work, c10::Device computed, c10::function_ref<void()> write) {
  if (!canTakeHistory(offload, work)) return false;
  torch::autograd::check_inplace(offload, true);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    write();
  }
  torch::autograd::increment_version(offload);
  takeHistory(offload, work, computed);
  return true;
}

bool rebase(const at::Tensor& offload, const at::Tensor& work) {
  if (!canTakeHistory(offload, work)) return false;
  torch::autograd::check_inplace(offload, true);
  takeHistory(offload, work, computedOn(work, offload.device()));
  return true;
}

bool recordsGraph() {
  return at::GradMode::is_enabled() && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
}

OFFLOAD_LIBRARY(offload, m) {
  // A graph that inductor captures can't hold them as they are: see torch_offload/compile/inductor.py for when it does.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::cudagraph_unsafe};
  m.def("fetch(Tensor self, Device device) -> Tensor", tags);
  m.def("fetch.coded(Tensor self, int type, int index, int alignment) -> Tensor", tags);
  m.def("look_up(Tensor self, Tensor index) -> Tensor", tags);
  m.def("stash(Tensor self, Device device) -> Tensor", tags);
  m.def("stash.coded(Tensor self, int index) -> Tensor", tags);
  m.def("give(Tensor self, Device device) -> Tensor", tags);
  m.def("give.coded(Tensor self, int index) -> Tensor", tags);
  m.def("write_(Tensor(a!) self, Tensor value) -> ()", tags);
}

namespace {

// Fetch and stash carry the bits, and names, over; resolving them first would take an operation, which would fetch.
void carryOver(torch::Library& m) {
  m.impl("fetch", torch::CppFunction::makeFallthrough());
  m.impl("stash", torch::CppFunction::makeFallthrough());
}

// Sparse tensors that are compressed are refused by it.
void takePlain(torch::Library& m) {
  m.impl("stash", stashPlain);
}

} // namespace

OFFLOAD_LIBRARY_IMPL(offload, Conjugate, m) {
  carryOver(m);
}

OFFLOAD_LIBRARY_IMPL(offload, Negative, m) {
  carryOver(m);
}

#ifdef OFFLOAD_NAMED_TENSORS
OFFLOAD_LIBRARY_IMPL(offload, Named, m) {
  carryOver(m);
}
#endif

OFFLOAD_LIBRARY_IMPL(offload, PrivateUse1, m) {
  m.impl("fetch", fetchPlain);
  m.impl("stash", stashPlain);
}

OFFLOAD_LIBRARY_IMPL(offload, SparsePrivateUse1, m) {
  m.impl("fetch", fetchPlain);
  m.impl("stash", stashPlain);
}

OFFLOAD_LIBRARY_IMPL(offload, AutogradPrivateUse1, m) {
  m.impl("fetch", fetchAutograd);
}

OFFLOAD_LIBRARY_IMPL(offload, CPU, m) {
  takePlain(m);
}

OFFLOAD_LIBRARY_IMPL(offload, CUDA, m) {
  takePlain(m);
}

OFFLOAD_LIBRARY_IMPL(offload, SparseCPU, m) {
  takePlain(m);
}

OFFLOAD_LIBRARY_IMPL(offload, SparseCUDA, m) {
  takePlain(m);
}

OFFLOAD_LIBRARY_IMPL(offload, SparseCsrCPU, m) {
  takePlain(m);
}

OFFLOAD_LIBRARY_IMPL(offload, SparseCsrCUDA, m) {
  takePlain(m);
}

OFFLOAD_LIBRARY_IMPL(offload, Autograd, m) {
  m.impl("stash", stashAutograd);
}

} // namespace offload
