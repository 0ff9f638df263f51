#include "aten/lookup.h"

#include "aten/tensors.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace offload {
namespace {

// What crosses the link for a byte.
constexpr std::size_t kLeastRead = 128;

const std::unordered_set<std::string_view> kLookups{
    "aten::embedding", "aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_forward_only",
    "aten::index",     "aten::_unsafe_index", "aten::index_select",
};

// Not those that write to `out=`, or take a dimension's name.
const std::unordered_set<std::string_view> kOverloads{"", "Tensor", "padding_idx"};

bool countsPlaces(const at::Tensor& index) {
  return index.scalar_type() == at::kLong || index.scalar_type() == at::kInt;
}

// What so many indices read, which go into dimensions up to `last`, of `taken` elements together.
std::optional<std::size_t> bytesOf(const at::Tensor& table, std::size_t indices, std::int64_t last, std::int64_t taken) {
  if (table.numel() == 0) return {};
  const auto piece = c10::multiply_integers(table.sizes().slice(static_cast<std::size_t>(last) + 1));
  const auto pieces = indices * static_cast<std::size_t>(table.numel() / taken / piece);
  return pieces * std::max(kLeastRead, static_cast<std::size_t>(piece) * table.element_size());
}

// Indices that don't fit are for the operation to refuse.
std::optional<std::size_t> bytesIndexed(const at::Tensor& table, const c10::IValue& indices) {
  const auto each = indices.toListRef();
  if (std::ssize(each) > table.dim()) return {};
  std::vector<std::int64_t> sizes; // of all indices, when they are broadcast, the last first
  std::int64_t taken = 1;
  std::int64_t last = -1;
  for (std::int64_t dim = 0; dim < std::ssize(each); ++dim) {
    const c10::IValue& item = each[static_cast<std::size_t>(dim)];
    if (!item.isTensor() || !item.toTensor().defined()) continue;
    const at::Tensor& index = item.toTensor();
    if (!countsPlaces(index)) return {}; // how many a mask picks only the device knows
    if (std::ssize(sizes) < index.dim()) sizes.resize(static_cast<std::size_t>(index.dim()), 1);
    for (std::int64_t k = 0; k < index.dim(); ++k) {
      auto& size = sizes[static_cast<std::size_t>(k)];
      size = std::max(size, index.size(index.dim() - 1 - k));
    }
    taken *= table.size(dim);
    last = dim;
  }
  return bytesOf(table, static_cast<std::size_t>(c10::multiply_integers(sizes)), last, taken);
}

} // namespace

bool isLookup(const c10::FunctionSchema& schema) {
  return kLookups.contains(schema.name()) && kOverloads.contains(schema.overload_name());
}

std::optional<std::size_t> bytesLookedUp(const OpTraits& traits, const torch::jit::Stack& stack) {
  const auto arguments = torch::jit::last(stack, traits.arguments.size());
  const at::Tensor& table = arguments[0].toTensor();
  if (table.dim() == 0 || !table.has_storage() || !table.is_contiguous() || table.is_conj() || table.is_neg()) return {};
  const auto count = [](const c10::IValue& index) { return static_cast<std::size_t>(index.toTensor().numel()); };
  if (arguments[1].isInt()) { // index_select
    const auto dim = c10::maybe_wrap_dim(arguments[1].toInt(), table.dim());
    return bytesOf(table, count(arguments[2]), dim, table.size(dim));
  }
  if (!arguments[1].isTensor()) return bytesIndexed(table, arguments[1]);
  for (std::size_t k = 2; k < arguments.size(); ++k) {
    if (!arguments[k].isTensor() || !at::GradMode::is_enabled()) continue;
    const at::Tensor& other = arguments[k].toTensor();
    if (other.defined() && other.requires_grad()) return {}; // a bag's weights, whose gradient is made of the table
  }
  return bytesOf(table, count(arguments[1]), 0, table.size(0));
}

bool isReadInPlace(std::size_t tableBytes, std::size_t reads, Stream stream) {
  if (tableBytes <= kLeastTable || reads > tableBytes / 2) return false;
  const Context& context = Context::get();
  if (context.residency().isCaptured(stream)) return false; // when the driver is not to be asked for a budget
  const std::size_t parameters = context.accounts().parameterBytes(stream.device);
  return std::max(parameters, tableBytes) > context.residency().budget(stream.device);
}

} // namespace offload
