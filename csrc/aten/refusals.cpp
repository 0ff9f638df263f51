#include "aten/refusals.h"

#include "aten/sparse.h"
#include "compat/registration.h"

#include <c10/core/Layout.h>

namespace offload {
namespace {

bool canBeHeld(const at::Tensor& value) {
  return isSparse(value) || (value.layout() == c10::kStrided && value.has_storage() && !value.is_nested());
}

[[noreturn]] void refuseLayout(const at::Tensor& value) {
  if (value.is_nested()) {
    TORCH_CHECK(
        false, "offload: a nested tensor of ", value.size(0),
        " tensors can't live on the offload device; keep it on the CPU or on CUDA, make one of layout torch.jagged, "
        "or pad it.");
  }
  TORCH_CHECK(
      false, "offload: a tensor of shape ", value.sizes(), " and layout ", value.layout(),
      " can't live on the offload device; offload tensors are dense, or sparse in COO form: make it one with .to_dense() or "
      ".to_sparse(), or keep it on the CPU or on CUDA.");
}

void refuseLayoutCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuseLayoutOf(op, *stack);
}

// Every operation that would make or fill a quantised offload tensor.
void refuseQuantizedCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  auto type = at::kQInt8;
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    if (values[k].isTensor() && values[k].toTensor().is_quantized()) type = values[k].toTensor().scalar_type();
    if (arguments[k].name() == "dtype" && values[k].isInt()) type = values[k].toScalarType();
  }
  refuseQuantized(type);
}

void refusePinnedCall(const c10::OperatorHandle& /*op*/, torch::jit::Stack* /*stack*/) {
  refusePinned();
}

// nn.TransformerEncoder asks before it makes a nested tensor of padded input.
bool mayBeNested(const at::Tensor& /*values*/, const at::Tensor& /*mask*/) {
  return false;
}

} // namespace

void checkLayout(const at::Tensor& value) {
  if (value.is_quantized()) refuseQuantized(value.scalar_type());
  if (!canBeHeld(value)) refuseLayout(value);
}

void refuseLayoutOf(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined() && !canBeHeld(value.toTensor())) refuseLayout(value.toTensor());
  }
  auto layout = at::kSparseCsr;
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    if (arguments[k].name() == "layout" && values[k].isInt()) layout = values[k].toLayout();
  }
  TORCH_CHECK(
      false, "offload: tensors of layout ", layout,
      " can't live on the offload device; make a dense one, or keep it on the CPU.");
}

void refuseNested(const c10::OperatorHandle& op, const torch::jit::Stack& stack, bool writes, bool differentiable) {
  for (const c10::IValue& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_nested()) continue;
    if (writes) refuseLayout(value.toTensor());
    TORCH_CHECK(
        !differentiable, "offload: ", op.schema().name(),
        " of a nested tensor and offload tensors has no gradient; call it under torch.no_grad(), make the nested tensor one of "
        "layout torch.jagged and of offload tensors, or pad it.");
  }
}

void refuseQuantized(at::ScalarType type) {
  TORCH_CHECK(
      false, "offload: a tensor of PyTorch's own quantised dtype ", type,
      " can't live on the offload device; dequantize() it first, keep it on the CPU, or quantise to integer tensors with "
      "scales, as torchao does.");
}

void refusePinned() {
  TORCH_CHECK(false, "offload: memory of the offload device is page-locked already where it can be; leave pin_memory out.");
}

OFFLOAD_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuseQuantizedCall>());
}

// PyTorch would make one of offload parts, which nothing computes on and nothing brings back.
OFFLOAD_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_to_copy", torch::CppFunction::makeFromBoxedFunction<&refuseLayoutCall>());
}

OFFLOAD_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  for (const char* name :
       {"sparse_compressed_tensor.comp_plain_value_size", "sparse_compressed_tensor.comp_plain_value",
        "_sparse_compressed_tensor_unsafe"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuseLayoutCall>());
  }
  m.impl("_to_copy", torch::CppFunction::makeFromBoxedFunction<&refuseLayoutCall>());
}

OFFLOAD_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_pin_memory", torch::CppFunction::makeFromBoxedFunction<&refusePinnedCall>());
  m.impl("_nested_tensor_from_mask_left_aligned", &mayBeNested);
}

} // namespace offload
