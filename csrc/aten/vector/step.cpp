#include "aten/vector/step.h"

#include "aten/vector/agreement.h"
#include "core/fork_mutex.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace offload {
namespace {

// What is taken together of each register: of half a dozen, the first level of a core's cache holds this and the next.
constexpr std::size_t kTileBytes = 512;
// How far ahead memory is asked for, so that it works while the steps are done: a processor sees for itself what comes next in one
// array, but not that of many in turns.
constexpr std::size_t kAheadBytes = 2 * kTileBytes;
constexpr std::size_t kLineBytes = 64;

std::optional<VectorType> vectorType(c10::ScalarType type) {
  switch (type) {
    case c10::kFloat:
      return VectorType::Float;
    case c10::kDouble:
      return VectorType::Double;
    case c10::kBFloat16:
      return VectorType::BFloat16;
    default:
      return std::nullopt;
  }
}

std::optional<double> numberOf(const c10::IValue& value) {
  if (value.isTensor() && isWrapped(value.toTensor())) return numberOf(c10::IValue(value.toTensor().item()));
  if (value.isDouble()) return value.toDouble();
  if (!value.isInt()) return std::nullopt;
  constexpr std::int64_t most = std::int64_t{1} << 53; // what is more is rounded twice on the way to a float
  return std::abs(value.toInt()) <= most ? std::optional(static_cast<double>(value.toInt())) : std::nullopt;
}

/// A step's arguments by name: registers, and numbers.
class Arguments {
 public:
  explicit Arguments(const ElementwiseStep& step) : step_(step) {}

  std::optional<std::size_t> reg(std::string_view name) const {
    for (const auto& [argument, source] : step_.registers) {
      if (nameOf(argument) == name) return source;
    }
    return std::nullopt;
  }

  std::optional<double> number(std::string_view name) const {
    for (std::size_t k = 0; k < step_.arguments.size(); ++k) {
      if (nameOf(k) == name) return numberOf(step_.arguments[k]);
    }
    return std::nullopt;
  }

 private:
  const std::string& nameOf(std::size_t argument) const {
    return step_.op.schema().arguments()[argument].name();
  }

  const ElementwiseStep& step_;
};

struct Call {
  VectorOp op;
  std::vector<std::optional<std::size_t>> from;
  std::string_view numberName; // of the argument that is the number; empty where there is none
  double factor = 1.0; // and what it is multiplied with
};

std::optional<Call> callOf(std::string_view name, const Arguments& given, VectorType type) {
  const auto self = given.reg("self");
  const auto other = given.reg("other");
  if (name == "add" || name == "sub") {
    const double sign = name == "add" ? 1.0 : -1.0;
    if (other) return Call{VectorOp::AddScaled, {self, other}, "alpha", sign};
    if (given.number("alpha") != 1.0) return std::nullopt;
    return Call{VectorOp::AddNumber, {self}, "other", sign};
  }
  if (name == "mul") return other ? Call{VectorOp::Multiply, {self, other}, ""} : Call{VectorOp::MultiplyBy, {self}, "other"};
  if (name == "div") return other ? Call{VectorOp::Divide, {self, other}, ""} : Call{VectorOp::DivideBy, {self}, "other"};
  if (name == "lerp") return Call{VectorOp::Lerp, {self, given.reg("end")}, "weight"};
  if (name == "addcmul") return Call{VectorOp::AddProduct, {self, given.reg("tensor1"), given.reg("tensor2")}, "value"};
  if (name == "addcdiv") return Call{VectorOp::AddQuotient, {self, given.reg("tensor1"), given.reg("tensor2")}, "value"};
  // Those of float and double come from a library, where there is one, and no number of samples shows that it rounds to the nearest.
  if (name == "sqrt" && type == VectorType::BFloat16) return Call{VectorOp::SquareRoot, {self}, ""};
  if (name == "neg") return Call{VectorOp::Negative, {self}, ""};
  return std::nullopt;
}

/// The operation's name, in place or not; none of those that round to integers.
std::optional<std::string_view> nameOf(const c10::FunctionSchema& schema) {
  std::string_view name = schema.name();
  const std::string_view overload = schema.overload_name();
  constexpr std::string_view aten = "aten::";
  if (!name.starts_with(aten)) return std::nullopt;
  name.remove_prefix(aten.size());
  const bool inPlace = name.ends_with('_');
  if (inPlace) name.remove_suffix(1);
  const bool known = inPlace ? overload.empty() || overload == "Tensor" || overload == "Scalar"
                             : overload == "out" || overload == "Scalar_out";
  return known ? std::optional(name) : std::nullopt;
}

/// How a kernel might do it.
std::optional<Call> callOf(const ElementwiseStep& step, VectorType type) {
  const auto name = nameOf(step.op.schema());
  if (!name) return std::nullopt;
  const Arguments given(step);
  auto call = callOf(*name, given, type);
  if (!call || !std::ranges::all_of(call->from, [](const auto& source) { return source.has_value(); })) return std::nullopt;
  if (!call->numberName.empty() && !given.number(call->numberName)) return std::nullopt;
  return call;
}

VectorStep translated(const ElementwiseStep& step, const Call& call, VectorKernel kernel) {
  const Arguments given(step);
  const auto out = given.reg("out");
  VectorStep made{kernel, out ? *out : *given.reg("self"), {}, 0.0};
  if (!call.numberName.empty()) made.number = call.factor * *given.number(call.numberName);
  std::ranges::transform(call.from, made.from.begin(), [](const auto& source) { return *source; });
  return made;
}

/// The step with a register of its own for each argument, and another number where it has one.
ElementwiseStep trialOf(const ElementwiseStep& step, std::string_view numberName, double number) {
  ElementwiseStep trial = step;
  for (std::size_t k = 0; k < trial.registers.size(); ++k) trial.registers[k].second = k;
  for (std::size_t k = 0; k < trial.arguments.size(); ++k) {
    if (step.op.schema().arguments()[k].name() != numberName) continue;
    c10::IValue& value = trial.arguments[k];
    value = value.isTensor() ? c10::IValue(at::native::wrapped_scalar_tensor(number)) : c10::IValue(number);
  }
  return trial;
}

bool agrees(
    const ElementwiseStep& step, std::string_view numberName, c10::ScalarType type, VectorType stored, VectorKernel kernel) {
  const auto sameWith = [&](double number, bool ofFew) {
    const ElementwiseStep trial = trialOf(step, numberName, number);
    return sameBits(trial, translated(trial, *callOf(trial, stored), kernel), type, ofFew);
  };
  if (numberName.empty()) return sameWith(0, true);
  // Of both signs, up to a half and one and beyond, what might be a case of its own, and of more bits than a type has.
  return std::ranges::all_of(std::array{0.1, 1.0 / 3.0, -0.7}, [&](double number) { return sameWith(number, true); }) &&
      std::ranges::all_of(std::array{0.0, 0.5, 1.0, -1.0, 2.0, 3.7, 1e-3, -1e-5, 1e-8}, [&](double number) {
           return sameWith(number, false);
         });
}

/// The same, looked at once for each operation and type.
bool isKnownToAgree(
    const ElementwiseStep& step, const Call& call, c10::ScalarType type, VectorType stored, VectorKernel kernel) {
  static ForkMutex mutex(ForkRank::Other);
  static std::map<std::tuple<std::string, VectorOp, VectorType>, bool> known;
  const auto key = std::tuple(step.op.schema().name(), call.op, stored);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find(key); found != known.end()) return found->second;
  }
  const bool found = agrees(step, call.numberName, type, stored, kernel);
  const std::lock_guard lock(mutex);
  return known.emplace(key, found).first->second;
}

/// Has the second level of the core's cache read a tile of each register that begins at a byte before `end`.
void askFor(std::span<std::byte* const> registers, std::size_t begin, std::size_t end) {
  for (const std::byte* const memory : registers) {
    for (std::size_t byte = begin; byte < std::min(begin + kTileBytes, end); byte += kLineBytes) {
      __builtin_prefetch(memory + byte, 0, 2);
    }
  }
}

} // namespace

VectorStep vectorStep(const ElementwiseStep& step, c10::ScalarType type) {
  const auto stored = vectorType(type);
  const auto call = stored ? callOf(step, *stored) : std::nullopt;
  if (!call) return {};
  const VectorKernel kernel = vectorKernel(call->op, *stored);
  if (kernel == nullptr || !isKnownToAgree(step, *call, type, *stored, kernel)) return {};
  return translated(step, *call, kernel);
}

void runVectorSteps(
    std::span<const VectorStep> steps, std::span<std::byte* const> registers, std::size_t count, std::size_t elementBytes) {
  const std::size_t tile = kTileBytes / elementBytes;
  for (std::size_t from = 0; from < count; from += tile) {
    askFor(registers, from * elementBytes + kAheadBytes, count * elementBytes);
    const std::size_t elements = std::min(tile, count - from);
    const auto at = [&](std::size_t number) { return registers[number] + from * elementBytes; };
    for (const VectorStep& step : steps) {
      const auto& [a, b, c] = step.from;
      step.kernel(at(step.to), at(a), at(b), at(c), step.number, elements);
    }
  }
}

} // namespace offload
