#include "aten/vector/agreement.h"

#include "aten/float_mode.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

namespace offload {
namespace {

constexpr std::int64_t kSamples = std::int64_t{1} << 15; // which PyTorch computes on one thread
// Fewer than PyTorch makes a vector of: it computes these, and what is left over of more, by other code, which rounds otherwise
// in some operations.
constexpr std::int64_t kFew = 7;
constexpr std::int64_t kTimesFew = 512;

using Limits = std::numeric_limits<double>;
constexpr double kSpecial[] = {
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, -1e-310, 3e38, 1e308, Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()};
constexpr std::uint64_t kSpecials = std::size(kSpecial);

// Sebastiano Vigna's splitmix64 (prng.di.unimi.it), by index: every bit is as random as any.
std::uint64_t randomBits(std::uint64_t index) {
  std::uint64_t bits = index * 0x9E3779B97F4A7C15;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

// First all triples of what is special; then many magnitudes of both signs, most positive as a square root is a number there.
double sampleValue(std::uint64_t registerNumber, std::uint64_t index) {
  if (index < kSpecials * kSpecials * kSpecials) {
    for (std::uint64_t k = 0; k < registerNumber; ++k) index /= kSpecials;
    return kSpecial[index % kSpecials];
  }
  const std::uint64_t place = 2 * (registerNumber * kSamples + index);
  const std::uint64_t exponentAndSign = randomBits(place + 1);
  const std::uint64_t sign = exponentAndSign % 4 == 0;
  const std::uint64_t exponent = 1023 - 16 + (exponentAndSign >> 8) % 24;
  return std::bit_cast<double>(sign << 63 | exponent << 52 | randomBits(place + 2) >> 12);
}

at::Tensor sample(c10::ScalarType type, std::uint64_t registerNumber) {
  at::Tensor values = at::empty({kSamples}, at::kDouble);
  auto* const to = values.mutable_data_ptr<double>();
  for (std::int64_t k = 0; k < kSamples; ++k) to[k] = sampleValue(registerNumber, static_cast<std::uint64_t>(k));
  return values.to(type);
}

bool sameBits(const at::Tensor& one, const at::Tensor& other, std::int64_t count) {
  const at::Tensor a = one.to(at::kDouble);
  const at::Tensor b = other.to(at::kDouble);
  const auto same = [](double x, double y) {
    return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y) || (std::isnan(x) && std::isnan(y));
  };
  return std::equal(a.const_data_ptr<double>(), a.const_data_ptr<double>() + count, b.const_data_ptr<double>(), same);
}

void runOperation(
    const ElementwiseStep& step, const std::vector<at::Tensor>& registers, std::int64_t from, std::int64_t count) {
  torch::jit::Stack stack = step.arguments;
  for (const auto& [argument, source] : step.registers) stack[argument] = registers[source].narrow(0, from, count);
  step.op.callBoxed(&stack);
}

std::vector<at::Tensor> copiesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& one : tensors) made.push_back(one.clone());
  return made;
}

// Has every fourth element of what is added to nearly cancel what is added, so that the result shows how that was rounded; in a type
// of 16 bits nothing else does.
void letCancel(const ElementwiseStep& step, std::vector<at::Tensor>& values, std::size_t addedTo) {
  const auto results = copiesOf(values);
  runOperation(step, results, 0, kSamples);
  const at::Tensor added = results[addedTo].to(at::kDouble) - values[addedTo].to(at::kDouble);
  constexpr std::int64_t begin = kSpecials * kSpecials * kSpecials;
  values[addedTo].slice(0, begin, kSamples, 4).copy_(-added.slice(0, begin, kSamples, 4));
}

} // namespace

bool sameBits(const ElementwiseStep& step, const VectorStep& vector, c10::ScalarType type, bool ofFew) {
  const at::AutoDispatchBelowADInplaceOrView belowAutograd;
  const at::DisableRecordFunctionGuard unseen; // by a profiler, to which these are none of the program's
  const FloatMode usual(kUsualFloatMode);
  std::vector<at::Tensor> values;
  for (std::size_t number = 0; number < step.registers.size(); ++number) values.push_back(sample(type, number));
  letCancel(step, values, vector.to);

  const auto found = copiesOf(values);
  std::vector<std::byte*> addresses;
  for (const at::Tensor& one : found) addresses.push_back(static_cast<std::byte*>(one.mutable_data_ptr()));
  runVectorSteps({&vector, 1}, addresses, kSamples, found.front().element_size());
  const auto expected = copiesOf(values);
  runOperation(step, expected, 0, kSamples);
  const auto expectedOfFew = copiesOf(values);
  for (std::int64_t k = 0; ofFew && k < kTimesFew; ++k) runOperation(step, expectedOfFew, k * kFew, kFew);
  for (std::size_t k = 0; k < found.size(); ++k) {
    if (!sameBits(found[k], expected[k], kSamples)) return false;
    if (ofFew && !sameBits(found[k], expectedOfFew[k], kTimesFew * kFew)) return false;
  }
  return true;
}

} // namespace offload
