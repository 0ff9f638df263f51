#include "aten/autocast_copies.h"

#include "aten/device_work.h"
#include "aten/fetch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace offload {
namespace {

std::atomic<bool> kept{false};
std::atomic<std::size_t> least{0};

/// What Block::copy points to.
struct LoweredCopy {
  at::Tensor value; // one dimension, of as many elements as the weight's storage
  std::atomic<std::uint64_t> version{UINT64_MAX}; // of the weight's Block that it was made of
};

std::mutex mutex; // of Block::copy

std::shared_ptr<LoweredCopy> copyOf(const Block& block) {
  const std::lock_guard lock(mutex);
  return std::static_pointer_cast<LoweredCopy>(block.copy);
}

void setCopy(Block& block, std::shared_ptr<LoweredCopy> copy) {
  std::shared_ptr<void> before = std::move(copy);
  const std::lock_guard lock(mutex);
  block.copy.swap(before);
}

bool mayHaveCopy(const at::Tensor& offload, c10::Device target) {
  const Context& context = Context::get();
  if (!isCached(target) || !context.hasCache() || offload.scalar_type() != at::kFloat || offload.is_neg()) return false;
  if (mayWorkOnDevice() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  if (offload.storage().nbytes() < least || offload.storage().nbytes() == 0) return false;
  const Block& block = blockOf(offload.storage());
  return block.purpose == Purpose::Parameter && block.born != Born::Device && !block.shared && !block.file &&
      block.bytes == offload.storage().nbytes() && block.bytes % sizeof(float) == 0 &&
      !context.residency().isCaptured(context.currentStream(target.index()));
}

// All of a Block of fp32 as a tensor.
at::Tensor allOf(Block& block) {
  const auto elements = static_cast<std::int64_t>(block.bytes / sizeof(float));
  return offloadTensor(Context::retain(block), {elements}, {1}, at::kFloat);
}

void renew(Block& block, std::shared_ptr<LoweredCopy> copy) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor weight = allOf(block);
  const at::Tensor value = copy->value;
  doOnHost({{weight, false}, {value, true}}, [&block, copy = std::move(copy), from = hostAlias(weight), to = hostAlias(value)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
    copy->version = Context::get().residency().versionOf(block);
  });
}

} // namespace

void setAutocastCopies(bool on, std::size_t leastBytes) {
  least = leastBytes;
  kept = on;
}

bool autocastCopies() {
  return kept;
}

at::Tensor fetchCopy(const at::Tensor& offload, c10::Device target, at::ScalarType dtype) {
  if (!kept || !mayHaveCopy(offload, target)) return {};
  Block& block = blockOf(offload.storage());
  const auto copy = copyOf(block);
  if (!copy || copy->value.scalar_type() != dtype) return {};
  const auto version = Context::get().residency().awaitVersion(block);
  if (!version || *version != copy->version) return {};
  // fetchTo() gives what autograd may not save of a weight where it may not be saved of this.
  std::optional<c10::InferenceMode> inference;
  if (offload.is_inference() && !c10::InferenceMode::is_enabled()) inference.emplace(true);
  const at::AutoDispatchBelowADInplaceOrView below;
  return fetchTo(copy->value.as_strided(offload.sizes(), offload.strides(), offload.storage_offset()), target);
}

void makeCopy(const at::Tensor& offload, c10::Device target, at::ScalarType dtype) {
  if (!kept || !mayHaveCopy(offload, target)) return;
  const c10::InferenceMode ordinary(false); // as it outlives the mode
  Block& block = blockOf(offload.storage());
  auto copy = copyOf(block);
  if (!copy || copy->value.scalar_type() != dtype) {
    copy = std::make_shared<LoweredCopy>();
    const auto elements = static_cast<std::int64_t>(block.bytes / sizeof(float));
    copy->value = emptyOffload({elements}, {1}, dtype, offload.device(), Born::Host, Purpose::Parameter);
    blockOf(copy->value.storage()).derivedFrom = block.data;
    setCopy(block, copy);
  }
  renew(block, std::move(copy));
}

void renewCopies(const std::vector<HostOperand>& operands) {
  for (const auto& [tensor, written] : operands) {
    if (!written || tensor.storage().nbytes() == 0) continue;
    Block& block = blockOf(tensor.storage());
    auto copy = copyOf(block);
    if (!copy) continue;
    if (kept && !mayWorkOnDevice()) {
      renew(block, std::move(copy));
    } else {
      setCopy(block, nullptr);
    }
  }
}

} // namespace offload
