#include "autograd/gapped_clone.h"

#include "core/extent.h"

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
  const auto period = std::max<std::int64_t>(1, static_cast<std::int64_t>(kAlignment) / value.element_size());
  std::int64_t walked = 1;
  std::int64_t next = 1;
  for (const std::int64_t d : order) {
    if (value.stride(d) == 0) continue;
    if (value.stride(d) < walked) return value.clone(at::MemoryFormat::Contiguous); // its elements overlap
    // Kernels are chosen by what rows begin at multiples of, too; rows that are shorter than that would take many times their bytes.
    const std::int64_t least = next < period ? 1 : 1 + (value.stride(d) - next - 1) % period;
    const std::int64_t gap = value.stride(d) == walked ? 0 : least;
    strides[d] = next + gap;
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
