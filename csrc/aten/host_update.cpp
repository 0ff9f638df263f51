#include "aten/host_update.h"

#include "aten/elementwise_program.h"
#include "aten/host_work.h"
#include "aten/tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace offload {
namespace {

using torch::jit::Stack;

// A thread takes a job over in the time in which an operation is done to less.
constexpr std::size_t kLeastBytes = std::size_t{1} << 20;

bool isList(ArgumentKind kind) {
  return kind == ArgumentKind::TensorList || kind == ArgumentKind::OptionalTensorList;
}

/// The calls that one on lists is made of: with the k-th tensors of all of them. None where they have different lengths.
std::vector<Stack> splitCalls(const OpTraits& traits, const Stack& arguments) {
  std::size_t count = 0;
  bool lists = false;
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    if (!isList(traits.arguments[k].kind) || !arguments[k].isTensorList()) continue;
    const std::size_t length = arguments[k].toTensorList().size();
    if (length > 0 && count > 0 && length != count) return {};
    count = std::max(count, length);
    lists = true;
  }
  if (!lists) return {arguments};
  std::vector<Stack> calls(count, arguments);
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    if (!isList(traits.arguments[k].kind) || !arguments[k].isTensorList()) continue;
    const auto list = arguments[k].toTensorList();
    for (std::size_t call = 0; call < count && !list.empty(); ++call) {
      calls[call][k] = c10::List<at::Tensor>({list.get(call)});
    }
  }
  return calls;
}

struct Call {
  Stack arguments;
  std::vector<HostOperand> operands;
};

// A count of steps, a rate: what it is now, as there may be another step before this one is done.
at::Tensor numberOf(const at::Tensor& tensor) {
  if (!isOffload(tensor)) return tensor.clone();
  const HostLease lease = leaseOf(tensor, Access::Read);
  return hostAlias(tensor).clone();
}

bool isNumber(const at::Tensor& tensor) {
  return (tensor.is_cpu() || isOffload(tensor)) && tensor.dim() == 0 && !tensor.is_complex() &&
      tensor.scalar_type() != at::kBool;
}

// Numbers that the dtype holds: of others PyTorch says that they overflow.
bool holds(at::ScalarType type, const c10::IValue& number) {
  if (!number.isInt() && !number.isDouble()) return false;
  double most = std::numeric_limits<double>::max();
  if (type == at::kFloat) most = std::numeric_limits<float>::max();
  if (type == at::kHalf) most = std::numeric_limits<c10::Half>::max();
  if (type == at::kBFloat16) most = std::numeric_limits<c10::BFloat16>::max();
  return std::abs(number.toScalar().toDouble()) <= most;
}

bool takesNumbers(const c10::FunctionSchema& schema, const Stack& arguments, at::ScalarType type) {
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    if (schema.arguments()[k].type()->kind() == c10::TypeKind::NumberType && !holds(type, arguments[k])) return false;
  }
  return true;
}

bool isCommon(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

/// Whether it can't fail: tensors of one floating-point dtype, one size and one order of elements, each of its own memory, and
/// numbers that the dtype holds.
bool isSafe(const c10::OperatorHandle& op, const OpTraits& traits, Call& call) {
  std::vector<at::Tensor> tensors;
  bool safe = true;
  replaceTensors(traits, call.arguments, [&](const at::Tensor& tensor, const ArgumentTraits& argument) {
    if (!argument.written && isNumber(tensor)) {
      safe = safe && (isWrapped(tensor) || traits.update == Update::OfOptimizer);
    } else {
      safe = safe && isOffload(tensor) && !tensor.is_sparse();
      tensors.push_back(tensor);
      call.operands.push_back({tensor, argument.written});
    }
    return at::Tensor();
  });
  if (!safe || tensors.empty()) return false;
  const auto type = tensors.front().scalar_type();
  return isCommon(type) && takesNumbers(op.schema(), call.arguments, type) && ElementwiseProgram::fits(tensors) &&
      std::ranges::all_of(tensors, [type](const auto& tensor) { return tensor.scalar_type() == type; });
}

bool isLarge(const Call& call) {
  return call.operands.front().tensor.nbytes() >= kLeastBytes;
}

} // namespace

bool updateOnHost(const c10::OperatorHandle& op, const OpTraits& traits, Stack& stack) {
  if (traits.update == Update::None || !Context::get().hasCache()) return false;
  const std::size_t count = traits.arguments.size();
  std::vector<Call> calls;
  for (Stack& arguments : splitCalls(traits, Stack(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end()))) {
    calls.push_back({std::move(arguments), {}});
    if (!isSafe(op, traits, calls.back())) return false;
  }
  if (calls.empty() || (traits.update == Update::OfAny && std::ranges::none_of(calls, isLarge))) return false;
  for (Call& call : calls) {
    replaceTensors(traits, call.arguments, [](const at::Tensor& tensor, const ArgumentTraits& argument) {
      return argument.written || !isNumber(tensor) ? hostAlias(tensor) : isWrapped(tensor) ? tensor : numberOf(tensor);
    });
    doOnHost(call.operands, [op, arguments = std::move(call.arguments)] {
      const at::AutoDispatchBelowADInplaceOrView belowAutograd;
      Stack stack = arguments;
      op.callBoxed(&stack);
    });
    // As PyTorch does: of an operation on one tensor its kernel for autograd has counted, and those of optimizers count nothing.
    if (traits.results > 0 || traits.update == Update::OfOptimizer) continue;
    for (const auto& [tensor, written] : call.operands) {
      if (written && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  stack.erase(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  if (traits.results > 0) stack.emplace_back(calls.front().operands.front().tensor);
  return true;
}

} // namespace offload
