// Views: PyTorch's own kernels, which only look at sizes and strides.
#include "compat/registration.h"

#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/tensor_split_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

namespace offload {
namespace {

// The positions are read on the host, and PyTorch insists on a CPU tensor.
std::vector<at::Tensor> tensorSplit(const at::Tensor& self, const at::Tensor& positions, std::int64_t dim) {
  return at::native::tensor_split(self, positions.cpu(), dim);
}

} // namespace

OFFLOAD_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("tensor_split.tensor_indices_or_sections", tensorSplit);
}

OFFLOAD_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("tensor_split.tensor_indices_or_sections", tensorSplit);
}

} // namespace offload
