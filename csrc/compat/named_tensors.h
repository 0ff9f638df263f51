// Names of dimensions, which PyTorch 2.15 does not have: neither the functions nor the dispatch key.
#pragma once

#include <ATen/core/Tensor.h>

#if __has_include(<ATen/NamedTensorUtils.h>)
#include <ATen/NamedTensorUtils.h>
#define OFFLOAD_NAMED_TENSORS
#endif

namespace offload::compat {

/// Gives the dimensions of `result` their names in `like`.
inline void copyNames([[maybe_unused]] const at::Tensor& result, [[maybe_unused]] const at::Tensor& like) {
#ifdef OFFLOAD_NAMED_TENSORS
  if (like.has_names()) at::namedinference::propagate_names(result, like);
#endif
}

} // namespace offload::compat
