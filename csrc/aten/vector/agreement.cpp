#include "aten/vector/agreement.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

namespace offload {
namespace {

constexpr std::int64_t kSamples = std::int64_t{1} << 15;
// Fewer than PyTorch makes vectors of: it computes these, and what is left over of more, by other code, which rounds otherwise
// in some operations.
constexpr std::int64_t kFew = 31;
constexpr std::int64_t kTimesFew = 256;

// Many magnitudes of both signs, most positive as a square root is a number there, and what is special.
at::Tensor sample(c10::ScalarType type, std::uint64_t number) {
  using Limits = std::numeric_limits<double>;
  constexpr double special[] = {
      0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, -1e-310, 3e38, 1e308, Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()};
  at::Tensor values = at::empty({kSamples}, at::kDouble);
  auto* const to = values.mutable_data_ptr<double>();
  std::uint64_t state = (number + 1) * 0x9E3779B97F4A7C15;
  for (std::int64_t k = 0; k < kSamples; ++k) {
    state = state * 6364136223846793005 + 1442695040888963407; // its upper bits are the random ones
    if (state >> 60 == 0) {
      to[k] = special[(state >> 48) % std::size(special)];
      continue;
    }
    const std::uint64_t sign = (state >> 58) % 4 == 0;
    const std::uint64_t exponent = 1023 - 16 + (state >> 50) % 24;
    to[k] = std::bit_cast<double>(sign << 63 | exponent << 52 | state << 8 >> 12);
  }
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

} // namespace

std::vector<at::Tensor> samples(c10::ScalarType type, std::size_t registers) {
  std::vector<at::Tensor> made;
  while (made.size() < registers) made.push_back(sample(type, made.size()));
  return made;
}

bool sameBits(const ElementwiseStep& step, const VectorStep& vector, const std::vector<at::Tensor>& samples) {
  const at::AutoDispatchBelowADInplaceOrView belowAutograd;
  const auto copies = [&samples] {
    std::vector<at::Tensor> made;
    for (const at::Tensor& one : samples) made.push_back(one.clone());
    return made;
  };
  const auto found = copies();
  std::vector<std::byte*> addresses;
  for (const at::Tensor& one : found) addresses.push_back(static_cast<std::byte*>(one.mutable_data_ptr()));
  runVectorSteps({&vector, 1}, addresses, kSamples, found.front().element_size());

  const auto expected = copies();
  runOperation(step, expected, 0, kSamples);
  const auto expectedOfFew = copies();
  for (std::int64_t k = 0; k < kTimesFew; ++k) runOperation(step, expectedOfFew, k * kFew, kFew);
  for (std::size_t k = 0; k < found.size(); ++k) {
    if (!sameBits(found[k], expected[k], kSamples) || !sameBits(found[k], expectedOfFew[k], kTimesFew * kFew)) return false;
  }
  return true;
}

} // namespace offload
