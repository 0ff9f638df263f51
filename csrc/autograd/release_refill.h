// What an operation saved for backward must not keep fetched weights on the GPU.
#pragma once

#include "core/extent.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

namespace offload {

/// Watches one call of an operation on fetched tensors.
///
/// Note [Release and refill]
/// PyTorch's own derivative saves the fetched tensor, and with it device memory that must go as soon as the operation has been
/// enqueued. So after the operation the nodes that it made get a hook before, which fetches into the same storage again, and one
/// after, which empties it. The fetched tensor shares its source's version counter: a source that was changed in between raises
/// PyTorch's own error. Left alone are storages that an output aliases, everything while saved-tensor hooks decide what is kept
/// (checkpointing, save_on_cpu), everything while tracing, and, from a backward on that records a graph, what that graph may need.
class ReleaseRefill {
 public:
  /// Without a history: what hooks hold goes with their node, outside of the loop in which PyTorch lets go of a long chain of these.
  struct Fetched {
    at::Tensor source;
    c10::Storage memory;
    c10::ScalarType type;
    Extent extent; // of the source's storage: what all of the memory was fetched of
  };

  /// For what is fetched to this target.
  explicit ReleaseRefill(c10::Device target);
  void add(const at::Tensor& source, const at::Tensor& fetched);
  /// Whether anything was added that the operation may have saved.
  bool watches() const {
    return !fetched_.empty();
  }
  /// After the operation, with all of its results.
  void finish(const std::vector<at::Tensor>& results);

 private:
  const c10::Device target_;
  const std::uint64_t firstNode_;
  std::vector<Fetched> fetched_;
};

} // namespace offload
