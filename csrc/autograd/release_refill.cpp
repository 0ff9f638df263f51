#include "autograd/release_refill.h"

#include "aten/fetch.h"
#include "aten/placement.h"
#include "aten/sparse.h"
#include "autograd/nodes.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

namespace offload {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// The fetched tensors of one call, emptied and refilled together; threads may run the call's nodes at once.
class Emptied {
 public:
  Emptied(std::vector<ReleaseRefill::Fetched> fetched, c10::Device target) : fetched_(std::move(fetched)), target_(target) {}

  void empty() {
    for (const auto& one : fetched_) releaseFetched(one.memory);
  }

  void acquire() {
    std::lock_guard lock(mutex_);
    // Also where another node uses them, or failed to: what could not be fetched then is missing still.
    for (const auto& one : fetched_) refillFetched(one.memory, one.type, one.source, one.extent, target_);
    ++users_;
  }

  void release() {
    std::lock_guard lock(mutex_);
    // What a backward that records a graph has used, that graph's nodes have saved, and they have no hooks.
    kept_ = kept_ || at::GradMode::is_enabled();
    if (--users_ == 0 && !kept_) empty();
  }

 private:
  std::mutex mutex_;
  int users_ = 0;
  bool kept_ = false;
  const std::vector<ReleaseRefill::Fetched> fetched_;
  const c10::Device target_;
};

struct Refill final : torch::autograd::FunctionPreHook {
  explicit Refill(std::shared_ptr<Emptied> e) : emptied(std::move(e)) {}
  variable_list operator()(const variable_list& gradients) override {
    emptied->acquire();
    return gradients;
  }
  std::shared_ptr<Emptied> emptied;
};

struct Release final : torch::autograd::FunctionPostHook {
  explicit Release(std::shared_ptr<Emptied> e) : emptied(std::move(e)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    // A gradient may be made of what was saved: the places of a sparse one are the indices that were looked up.
    variable_list own = outputs;
    for (at::Tensor& output : own) {
      if (output.defined() && isFetched(output)) output = output.clone();
    }
    emptied->release();
    return own;
  }
  std::shared_ptr<Emptied> emptied;
};

// What only looks at sizes and dtypes: these save no tensor, and a refill would be for nothing.
bool savesTensors(const Node& node) {
  static const std::unordered_set<std::string> shapesOnly{
      "TBackward0",      "TransposeBackward0", "ViewBackward0",      "UnsafeViewBackward0", "ReshapeAliasBackward0",
      "ExpandBackward0", "PermuteBackward0",   "UnsqueezeBackward0", "SqueezeBackward1",    "SelectBackward0",
      "SliceBackward0",  "SplitBackward0",     "AsStridedBackward0", "ToCopyBackward0"};
  return !shapesOnly.contains(node.name());
}

// The nodes made since `first`, from the results down.
std::vector<Node*> nodesMade(const std::vector<at::Tensor>& results, std::uint64_t first) {
  std::vector<Node*> todo;
  for (const auto& result : results) {
    if (result.defined() && result.grad_fn()) todo.push_back(result.grad_fn().get());
  }
  std::vector<Node*> nodes;
  std::unordered_set<Node*> seen;
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    // The sinks of gradients carry the highest number, whenever they were made; so do fetch and stash.
    const bool made = node->sequence_nr() >= first && node->sequence_nr() != UINT64_MAX;
    if (!seen.insert(node).second || !made) continue;
    if (savesTensors(*node)) nodes.push_back(node);
    for (const auto& edge : node->next_edges()) {
      if (edge.function) todo.push_back(edge.function.get());
    }
  }
  return nodes;
}

bool aliases(const at::Tensor& result, const c10::Storage& memory) {
  if (!result.defined()) return false;
  bool alias = false;
  visitDense(
      result, [&](const at::Tensor& dense) { alias = alias || (dense.has_storage() && dense.storage().is_alias_of(memory)); });
  return alias;
}

} // namespace

ReleaseRefill::ReleaseRefill(c10::Device target) : target_(target), firstNode_(at::sequence_number::peek()) {}

void ReleaseRefill::add(const at::Tensor& source, const at::Tensor& fetched) {
  if (!isCached(target_) || !recordsGraph() || tracing()) return;
  if (isSparse(source) && isSparse(fetched)) {
    const auto of = partsOf(source);
    const auto parts = partsOf(fetched);
    add(of.indices, parts.indices);
    add(of.values, parts.values);
    return;
  }
  // What the source holds now: `source.data = ...`, as in module.to(), puts other memory into the same tensor.
  auto held = tensorOver(source.storage(), kOffload, source, source.storage_offset());
  const Extent extent = fetchedExtent(fetched, held);
  fetched_.push_back({std::move(held), fetched.storage(), fetched.scalar_type(), extent});
}

void ReleaseRefill::finish(const std::vector<at::Tensor>& results) {
  if (!recordsGraph() || tracing() || at::SavedTensorDefaultHooks::get_hooks()) return;
  std::vector<Fetched> mine;
  for (const Fetched& one : fetched_) {
    const bool aliased = std::ranges::any_of(results, [&one](const at::Tensor& result) { return aliases(result, one.memory); });
    if (!aliased) mine.push_back(one);
  }
  fetched_.clear();
  if (mine.empty()) return;
  const auto nodes = nodesMade(results, firstNode_);
  if (nodes.empty()) return;
  auto emptied = std::make_shared<Emptied>(std::move(mine), target_);
  for (Node* node : nodes) {
    node->add_pre_hook(std::make_unique<Refill>(emptied));
    node->add_post_hook(std::make_unique<Release>(emptied));
  }
  emptied->empty();
}

} // namespace offload
