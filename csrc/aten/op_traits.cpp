#include "aten/op_traits.h"

#include "aten/lookup.h"
#include "aten/op_names.h"
#include "aten/tensors.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace offload {
namespace {

using c10::DispatchKey;

ArgumentKind kindOf(const c10::Argument& argument) {
  const auto& type = *argument.real_type();
  auto element = [](const c10::Type& t) -> const c10::Type& { return *t.containedType(0); };
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return ArgumentKind::Tensor;
    case c10::TypeKind::GeneratorType:
      return ArgumentKind::Generator;
    case c10::TypeKind::DeviceObjType:
      return ArgumentKind::Device;
    case c10::TypeKind::ListType:
      if (element(type).kind() == c10::TypeKind::TensorType) return ArgumentKind::TensorList;
      if (element(type).kind() == c10::TypeKind::OptionalType && element(element(type)).kind() == c10::TypeKind::TensorType) {
        return ArgumentKind::OptionalTensorList;
      }
      return ArgumentKind::Other;
    case c10::TypeKind::OptionalType:
      if (element(type).kind() == c10::TypeKind::TensorType) return ArgumentKind::Tensor;
      if (element(type).kind() == c10::TypeKind::GeneratorType) return ArgumentKind::Generator;
      if (element(type).kind() == c10::TypeKind::DeviceObjType) return ArgumentKind::Device;
      if (element(type).kind() == c10::TypeKind::ListType && element(element(type)).kind() == c10::TypeKind::TensorType) {
        return ArgumentKind::TensorList;
      }
      return ArgumentKind::Other;
    default:
      return ArgumentKind::Other;
  }
}

#define OFFLOAD_NAME_(op, ...) "aten::" #op,
const std::unordered_set<std::string_view> kLowered{AT_FORALL_LOWER_PRECISION_FP(OFFLOAD_NAME_)};
#undef OFFLOAD_NAME_

bool holdsTensors(ArgumentKind kind) {
  return kind == ArgumentKind::Tensor || kind == ArgumentKind::TensorList || kind == ArgumentKind::OptionalTensorList;
}

bool endsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// By Update; also as `_foreach_`.
const std::unordered_set<std::string_view> kUpdates{"mul_", "add_", "sub_", "div_", "lerp_", "addcmul_", "addcdiv_"};

const std::unordered_set<std::string_view> kFills{"aten::zero_", "aten::fill_", "aten::_foreach_zero_"};

bool startsWith(std::string_view& text, std::string_view start) {
  if (!text.starts_with(start)) return false;
  text.remove_prefix(start.size());
  return true;
}

Update updateOf(const c10::FunctionSchema& schema) {
  std::string_view name = schema.name();
  if (!startsWith(name, "aten::")) return Update::None;
  if (startsWith(name, "_fused_")) return endsWith(name, "_") ? Update::OfOptimizer : Update::None;
  // Lists of numbers and modes of rounding may be wrong.
  const auto& overload = schema.overload_name();
  if (overload == "ScalarList" || overload == "Tensor_mode" || overload == "Scalar_mode") return Update::None;
  startsWith(name, "_foreach_");
  return kUpdates.contains(name) ? Update::OfAny : Update::None;
}

bool makesItsOwnMemory(std::string_view name) {
  return endsWith(name, "_like") || name.starts_with("aten::new_");
}

bool isView(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool isComposite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

// Of a composite operation: whether its parts, which are intercepted too, would give other bits than the device does. The device
// may have a kernel for the whole (`silu_backward`), and autocast another dtype (`cross_entropy_loss`, where the CPU computes).
bool isTakenWhole(const c10::OperatorHandle& op) {
  return picksByDevice(op.schema().name()) || op.hasKernelForDispatchKey(DispatchKey::AutocastCUDA) ||
      op.hasKernelForDispatchKey(DispatchKey::AutocastCPU) || op.hasKernelForDispatchKey(DispatchKey::CPU) ||
      op.hasKernelForDispatchKey(DispatchKey::CUDA);
}

} // namespace

OpTraits::OpTraits(const c10::OperatorHandle& op) : results(op.schema().returns().size()) {
  const auto& schema = op.schema();
  bool writes = false;
  looksUp = isLookup(schema);
  contracts = schema.name() == "aten::einsum";
  draws = op.hasTag(at::Tag::nondeterministic_seeded);
  countsWrites = op.hasKernelForDispatchKey(DispatchKey::ADInplaceOrView) || op.schema().name().starts_with("aten::_foreach_");
  fills = kFills.contains(schema.name()) && schema.overload_name() != "Tensor";
  for (const auto& argument : schema.arguments()) {
    ArgumentTraits traits;
    traits.table = looksUp && arguments.empty();
    traits.kind = kindOf(argument);
    traits.written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    traits.out = traits.written && argument.kwarg_only();
    traits.hidden = !traits.written && (argument.name() == "running_mean" || argument.name() == "running_var");
    traits.sizes = argument.name() == "batch_sizes";
    writes = writes || traits.written;
    if (argument.name() == "training" || argument.name() == "train" || argument.name() == "use_input_stats") {
      trainingArgument = static_cast<int>(arguments.size());
    }
    if (argument.name() == "accumulate") accumulateArgument = static_cast<int>(arguments.size());
    arguments.push_back(traits);
  }
  // An operation that makes something new computes, and what it writes to beside, as batch norm does, follows.
  const bool makes = std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() == nullptr && holdsTensors(kindOf(result));
  });
  if (writes && !makes && !writesInForward(schema.name())) {
    effect = Effect::InPlace;
    update = updateOf(schema);
  } else if (onlyMoves(schema.name()) && !endsWith(schema.overload_name(), "reduce")) {
    effect = Effect::Movement; // with `reduce`, scatter adds or multiplies
  }
  updatesStatistics = alwaysUpdatesStatistics(schema.name());
  convertsDevice = schema.name() == "aten::_to_copy";
  goesToOther = schema.name() == "aten::type_as";
  countsFromStorage = schema.name() == "aten::as_strided_copy" || schema.name() == "aten::as_strided_scatter";
  composite = isComposite(op);
  decomposes = composite && !isTakenWhole(op);
  const bool lowers = kLowered.contains(schema.name());
  lowersOnCuda = lowers && op.hasKernelForDispatchKey(DispatchKey::AutocastCUDA);
  lowersOnCpu = lowers && op.hasKernelForDispatchKey(DispatchKey::AutocastCPU);
}

bool OpTraits::isTrue(int argument, const torch::jit::Stack& stack) const {
  const auto& value = stack[stack.size() - arguments.size() + static_cast<std::size_t>(argument)];
  return value.isBool() && value.toBool();
}

bool OpTraits::writesHidden(const torch::jit::Stack& stack) const {
  return trainingArgument < 0 ? updatesStatistics : isTrue(trainingArgument, stack);
}

bool OpTraits::takenApart(const torch::jit::Stack& stack) const {
  return decomposes || (contracts && torch::jit::last(stack, arguments.size())[1].toListRef().size() == 1);
}

bool OpTraits::adds(const torch::jit::Stack& stack) const {
  return effect == Effect::Movement && accumulateArgument >= 0 && isTrue(accumulateArgument, stack);
}

bool OpTraits::leavesDevice(const torch::jit::Stack& stack) const {
  const auto values = torch::jit::last(stack, arguments.size());
  const c10::Device here = values[0].toTensor().device();
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    if (arguments[k].kind != ArgumentKind::Device || !values[k].isDevice()) continue;
    const c10::Device to = values[k].toDevice();
    if (to.type() != kOffload || withIndex(to) != here) return true;
  }
  return false;
}

Operands OpTraits::operands(const torch::jit::Stack& stack) const {
  Operands found;
  found.drawn = draws;
  const auto values = torch::jit::last(stack, arguments.size());
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    const auto& argument = arguments[k];
    const auto& value = values[k];
    if (value.isTensor()) {
      if (argument.sizes && value.toTensor().is_cpu()) continue;
      found.add(value.toTensor(), argument.written, argument.out);
    } else if (argument.kind == ArgumentKind::Generator && value.isGenerator()) {
      const auto type = value.toGenerator().device().type();
      found.hostGenerator = type == c10::kCPU || type == kOffload;
    } else if (argument.kind == ArgumentKind::TensorList && value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) found.add(tensor, argument.written, argument.out);
    } else if (argument.kind == ArgumentKind::OptionalTensorList && value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) found.add(item.toTensor(), argument.written, argument.out);
      }
    }
  }
  found.writesInference = found.writesInference && countsWrites;
  return found;
}

bool isInterceptable(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string_view name = schema.name();
  if (name.starts_with("offload::") || name.starts_with("profiler::")) return false;
  // Dynamo calls it for `addcmul_` with a factor, from PyTorch 2.15 on. The others are what is made of operations later on.
  if (name.starts_with("prim") && name != "prims::fma") return false;
  // What these return is still being written: their parts decide.
  if (name.starts_with("_c10d_functional") || name.starts_with("c10d_functional::")) return false;
  if (hasItsOwnKernel(name) || makesItsOwnMemory(name) || isView(schema)) return false;
  // Given a device, these are dispatched by it, whatever their operands are.
  if (op.hasKernelForDispatchKey(DispatchKey::BackendSelect) && name != "aten::_to_copy") return false;
  // These change sizes and strides of their operand, and none of its bytes.
  if (op.hasTag(at::Tag::inplace_view)) return false;
  int tensors = 0;
  for (const auto& argument : schema.arguments()) {
    const auto kind = kindOf(argument);
    if (holdsTensors(kind)) tensors += kind == ArgumentKind::Tensor ? 1 : 2;
  }
  if (tensors == 0) return false;
  if (op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) || op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1)) {
    return false;
  }
  // Many composite operations want all tensors on one device before they call anything.
  return !isComposite(op) || tensors > 1 || isTakenWhole(op);
}

void replaceTensors(
    const OpTraits& traits, torch::jit::Stack& stack,
    c10::function_ref<at::Tensor(const at::Tensor&, const ArgumentTraits&)> each) {
  const std::size_t base = stack.size() - traits.arguments.size();
  for (std::size_t k = 0; k < traits.arguments.size(); ++k) {
    const auto& argument = traits.arguments[k];
    auto& value = stack[base + k];
    if (value.isTensor()) {
      if (!value.toTensor().defined()) continue;
      auto replacement = each(value.toTensor(), argument);
      if (replacement.defined()) value = std::move(replacement);
    } else if (argument.kind == ArgumentKind::TensorList && value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) {
        if (!tensor.defined()) continue;
        auto replacement = each(tensor, argument);
        if (replacement.defined()) tensor = std::move(replacement);
      }
      value = std::move(list);
    } else if (argument.kind == ArgumentKind::OptionalTensorList && value.isList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& item : value.toListRef()) {
        std::optional<at::Tensor> tensor;
        if (item.isTensor()) {
          tensor = item.toTensor();
          auto replacement = each(*tensor, argument);
          if (replacement.defined()) tensor = std::move(replacement);
        }
        list.push_back(std::move(tensor));
      }
      value = std::move(list);
    }
  }
}

void replaceResults(std::size_t count, torch::jit::Stack& stack, c10::function_ref<at::Tensor(const at::Tensor&)> each) {
  for (auto& value : torch::jit::last(stack, count)) {
    auto& slot = const_cast<c10::IValue&>(value);
    if (slot.isTensor()) {
      if (slot.toTensor().defined()) slot = each(slot.toTensor());
    } else if (slot.isTensorList()) {
      auto list = slot.toTensorVector();
      for (auto& tensor : list) {
        if (tensor.defined()) tensor = each(tensor);
      }
      slot = std::move(list);
    }
  }
}

std::vector<at::Tensor> resultTensors(std::size_t count, const torch::jit::Stack& stack) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : torch::jit::last(stack, count)) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

} // namespace offload
