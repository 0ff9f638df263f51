#include "autograd/saved_tensors.h"

#include "autograd/saved_order.h"
#include "core/error.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <sstream>

namespace offload {
namespace {

constexpr std::size_t kLookedAt = 32; // of those that wait, whenever something is saved
constexpr std::size_t kMostGone = 32; // in a list, beside as many as are there

constexpr c10::DispatchKeySet kWrappers({
    c10::DispatchKey::Python,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
});

bool isPlain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && !tensor.key_set().has_any(kWrappers) && tensor.has_storage() &&
      !tensor.is_quantized() && !tensor._is_zerotensor() && tensor.storage().nbytes() > 0;
}

c10::DeviceIndex indexOf(const at::Tensor& tensor) {
  return tensor.is_cuda() ? tensor.device().index() : currentIndex();
}

// While a graph is captured nothing may be copied, nor host memory be page-locked.
bool isCaptured(const at::Tensor& tensor) {
  const Context& context = Context::get();
  return tensor.device().type() == context.computeType() && context.link()->capturing(context.currentStream(indexOf(tensor)));
}

at::Tensor withoutMemory(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr, false);
  return tensorOver(std::move(none), device.type(), tensor, tensor.storage_offset());
}

at::Tensor detached(const at::Tensor& tensor) {
  const at::AutoGradMode mode(false);
  return tensor.detach();
}

} // namespace

// ---- one tensor

SavedTensor::SavedTensor(std::shared_ptr<SavedStorage> storage, const at::Tensor& tensor)
    : storage_(std::move(storage)),
      kept_(storage_ ? withoutMemory(tensor) : detached(tensor)),
      version_(tensor.unsafeGetTensorImpl()->version_counter()),
      savedVersion_(version_.enabled() ? version_.current_version() : 0) {}

void SavedTensor::refuseChanged() const {
  std::ostringstream sizes;
  if (!kept_.is_nested()) sizes << " " << kept_.sizes();
  TORCH_CHECK(
      false, "one of the variables needed for gradient computation has been modified by an inplace operation: [",
      kept_.toString(), sizes.str(), "] is at version ", version_.current_version(), "; expected version ", savedVersion_,
      " instead. (It was saved within torch_offload.saved_tensors.)");
}

at::Tensor SavedTensor::unpack() const {
  if (version_.enabled() && version_.current_version() != savedVersion_) refuseChanged();
  if (!storage_) return kept_;
  auto result = storage_->restore(kept_);
  if (version_.enabled()) result.unsafeGetTensorImpl()->set_version_counter(version_);
  return result;
}

// ---- a region

bool SavedTensors::mayGoHome(const at::Tensor& tensor) const {
  const Context& context = Context::get();
  return options_.activations && context.hasCache() && isPlain(tensor) && tensor.device().type() == context.computeType() &&
      tensor.storage().nbytes() >= options_.minBytes && !isFetched(tensor) && !isCaptured(tensor);
}

std::shared_ptr<SavedTensor> SavedTensors::pack(const at::Tensor& tensor, bool home) {
  return std::make_shared<SavedTensor>(storageOf(tensor, home), tensor);
}

// Null where the tensor is to be kept as it is.
std::shared_ptr<SavedStorage> SavedTensors::storageOf(const at::Tensor& tensor, bool home) {
  if (!Context::get().hasCache() || !isPlain(tensor) || isCaptured(tensor)) return nullptr;
  // What a checkpoint computes anew, or a backward saves, is wanted soon.
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  if (!backward) sendHomeWhatMayGo(pairedDevice(indexOf(tensor)), kLookedAt);
  if (auto source = sourceOf(tensor)) {
    const c10::Device target = pairedDevice(static_cast<c10::DeviceIndex>(source->device));
    return std::make_shared<SavedStorage>(shared_from_this(), std::move(*source), target);
  }
  return home && !backward && mayGoHome(tensor) ? noteDown(tensor) : nullptr;
}

std::shared_ptr<SavedStorage> SavedTensors::noteDown(const at::Tensor& tensor) {
  const c10::DeviceIndex index = indexOf(tensor);
  const c10::Device target = pairedDevice(index);
  const Stream stream = Context::get().currentStream(index);
  if (meter_) meter_->saving(target, roomToStay());
  {
    const std::lock_guard lock(mutex_);
    ++noted_[index];
  }
  SavedOrder& order = SavedOrder::of(target);
  if (auto known = order.find(tensor, stream)) return known;
  auto made = std::make_shared<SavedStorage>(shared_from_this(), tensor, target, stream);
  order.add(made);
  return made;
}

void SavedTensors::left() {
  std::map<c10::DeviceIndex, std::size_t> noted;
  {
    const std::lock_guard lock(mutex_);
    noted.swap(noted_);
  }
  if (noted.empty()) return;
  const std::size_t last = Context::get().residency().ringBytes() / 2;
  const Context& context = Context::get();
  for (const auto& [index, count] : noted) {
    if (context.link()->capturing(context.currentStream(index))) continue;
    sendHomeWhatMayGo(pairedDevice(index), count > kLookedAt ? SIZE_MAX : 2 * kLookedAt, last);
  }
}

// Of all regions: one that a program has left will not ask again.
void SavedTensors::sendHomeWhatMayGo(c10::Device target, std::size_t look, std::size_t lastBytes) {
  std::vector<std::shared_ptr<SavedTensors>> owners;
  for (auto& saved : SavedOrder::of(target).newlyAlone(look, lastBytes)) {
    const auto& owner = saved->owner_;
    if (std::ranges::find(owners, owner) == owners.end()) owners.push_back(owner);
    const std::lock_guard lock(owner->mutex_);
    saved->isAlone_ = true;
    owner->aloneBytes_ += saved->bytes_;
    ++owner->aloneCount_;
    owner->alone_.push_back(saved);
    if (owner->alone_.size() > 2 * owner->aloneCount_ + kMostGone) {
      std::erase_if(owner->alone_, [](const auto& storage) { return storage.expired(); });
    }
  }
  for (const auto& owner : owners) owner->sendWhatExceeds();
}

void SavedTensors::sendWhatExceeds() {
  for (;;) {
    std::shared_ptr<SavedStorage> next;
    {
      const std::lock_guard lock(mutex_);
      while (!next && !alone_.empty() && aloneBytes_ > options_.keepBytes) {
        next = alone_.front().lock();
        alone_.pop_front();
      }
      if (!next) return;
      next->isAlone_ = false;
      aloneBytes_ -= next->bytes_;
      --aloneCount_;
    }
    try {
      if (Context::get().link()->capturing(next->stream_)) continue;
      const std::size_t bytes = next->bytesToSend();
      if (hostBytes_ + bytes > options_.maxHostBytes) {
        doWithout(
            "those on the host may take " + std::to_string(options_.maxHostBytes) + " bytes, and take " +
            std::to_string(hostBytes_.load()) + " now");
        continue;
      }
      const auto goes = meter_ ? meter_->take(bytes, next->bytes_, roomToStay()) : StepMeter::Next{};
      if (!goes.goes) letStay(*next);
      if (!goes.goes && !goes.underWay) continue;
      // What waits is the stream that it was made on.
      const bool here = next->stream_ == Context::get().currentStream(static_cast<c10::DeviceIndex>(next->stream_.device));
      const StepMeter::Wait wait(here ? meter() : nullptr, next->target_, true);
      if (goes.underWay) Context::get().residency().giveUpLeaving(next->stream_.device, Purpose::Activation, *goes.underWay);
      if (!goes.goes || !next->goHome()) continue;
      if (const std::size_t most = options_.useStreams ? options_.inFlightBytes : 0; most < SIZE_MAX) {
        Context::get().residency().giveUpLeaving(next->stream_.device, Purpose::Activation, most);
      }
      if (meter_) meter_->sent(bytes);
    } catch (const c10::OutOfMemoryError& error) {
      doWithout(error.what_without_backtrace());
      continue;
    } catch (const Error& error) {
      doWithout(error.what());
      continue;
    }
    hostBytes_ += next->extent_.bytes();
    SavedOrder::of(next->target_).wentHome(*next);
  }
}

std::size_t SavedTensors::roomToStay() {
  const std::lock_guard lock(mutex_);
  return options_.maxGpuBytes - std::min(options_.keepBytes + stayingBytes_, options_.maxGpuBytes);
}

void SavedTensors::letStay(SavedStorage& saved) {
  const std::lock_guard lock(mutex_);
  saved.isStaying_ = true;
  stayingBytes_ += saved.bytes_;
}

void SavedTensors::doWithout(const std::string& why) {
  if (warned_.exchange(true)) return;
  TORCH_WARN("offload: saved tensors stay on the device: ", why, ". (Said once for each torch_offload.saved_tensors.)");
}

at::Tensor SavedTensors::unpack(const SavedTensor& saved) {
  if (!saved.storage_) return saved.unpack();
  const SavedStorage& storage = *saved.storage_;
  SavedOrder& order = SavedOrder::of(storage.target_);
  // Else somebody only looks at it.
  StepMeter* const watching = torch::autograd::get_current_graph_task_id() != -1 ? meter() : nullptr;
  if (watching != nullptr) watching->asking(storage.target_);
  at::Tensor result;
  {
    const StepMeter::Wait wait(order.isHome(storage) ? watching : nullptr, storage.target_, false);
    result = saved.unpack();
    if (options_.useStreams)
      order.fetchAheadOf(storage, options_.inFlightBytes); // makes room, for which the stream may have to wait
  }
  if (watching != nullptr) watching->asked(storage.target_);
  return result;
}

void SavedTensors::forget(SavedStorage& saved) noexcept {
  if (saved.isHome_) hostBytes_ -= saved.extent_.bytes();
  const std::lock_guard lock(mutex_);
  if (saved.isAlone_) {
    aloneBytes_ -= saved.bytes_;
    --aloneCount_;
  }
  if (saved.isStaying_) stayingBytes_ -= saved.bytes_;
}

} // namespace offload
