#include "autograd/gapped_clone.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace offload {

at::Tensor cloneWithGaps(const at::Tensor& value) {
  c10::DimVector order(value.dim());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](std::int64_t d) { return std::pair(value.stride(d), value.size(d)); };
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return rank(a) < rank(b); });
  c10::DimVector strides(value.dim(), 0);
  std::int64_t walked = 1;
  std::int64_t next = 1;
  for (const std::int64_t d : order) {
    if (value.stride(d) == 0) continue;
    if (value.stride(d) < walked) return value.clone(at::MemoryFormat::Contiguous); // its elements overlap
    strides[d] = value.stride(d) == walked ? next : next + 1;
    walked = value.stride(d) * value.size(d);
    next = strides[d] * value.size(d);
  }
  at::Tensor copy = at::empty_strided(value.sizes(), strides, value.options());
  // Repeated elements can't be written to as such.
  at::Tensor once = copy;
  at::Tensor from = value;
  for (const auto d : c10::irange(value.dim())) {
    if (strides[d] != 0) continue;
    once = once.narrow(d, 0, 1);
    from = from.narrow(d, 0, 1);
  }
  once.copy_(from);
  return copy;
}

} // namespace offload
