// Padding that repeats the border, where only deterministic algorithms are wanted. CUDA's own backward of it adds up in any order.
#include "aten/fetch.h"
#include "compat/registration.h"

#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_index.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/pad_native.h>

namespace offload {
namespace {

// As torch.nn.functional.pad has it for tensors that say that they are on CUDA: by indices, whose gradient is an index_put.
at::Tensor repeatBorder(const at::Tensor& self, c10::SymIntArrayRef padding) {
  const auto padded = static_cast<std::int64_t>(padding.size() / 2);
  at::Tensor result = self.to(at::toOpMathType(self.scalar_type()));
  for (std::int64_t dim = self.dim() - padded; dim < self.dim(); ++dim) {
    const auto at = static_cast<std::size_t>(2 * (self.dim() - 1 - dim)); // the last dimension comes first
    const auto size = self.sym_size(dim);
    const auto positions = at::arange(-padding[at], size + padding[at + 1], self.options().dtype(at::kLong)).clamp(0, size - 1);
    c10::List<std::optional<at::Tensor>> indices;
    indices.resize(static_cast<std::size_t>(self.dim()));
    indices.set(static_cast<std::size_t>(dim), positions);
    result = at::_unsafe_index(result, indices);
  }
  return result.contiguous(result.suggest_memory_format()).to(self.scalar_type());
}

bool isPadding(const at::Tensor& self, c10::SymIntArrayRef padding) {
  const auto padded = static_cast<std::int64_t>(padding.size() / 2);
  return padding.size() % 2 == 0 && padded >= 1 && padded <= 3 && (self.dim() == padded + 1 || self.dim() == padded + 2);
}

bool wantsSteadyGradient(const at::Tensor& self) {
  return self.requires_grad() && at::GradMode::is_enabled() && at::globalContext().deterministicAlgorithms() &&
      pairedDevice(self.device().index()).is_cuda();
}

at::Tensor pad(const at::Tensor& self, c10::SymIntArrayRef padding, c10::string_view mode, std::optional<double> value) {
  if (mode == "replicate" && wantsSteadyGradient(self) && isPadding(self, padding)) return repeatBorder(self, padding);
  return at::native::pad_symint(self, padding, mode, value);
}

} // namespace

OFFLOAD_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("pad", pad);
}

} // namespace offload
