#include "autograd/saved_tensors.h"

#include "core/error.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <sstream>

namespace offload {
namespace {

constexpr int kMostLookedAt = 32; // of those that wait, whenever something is saved
constexpr std::size_t kMostAhead = 16; // copies, with each that is asked for

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

// The stream that work goes to now; none on the CPU, whose memory belongs to no stream.
std::optional<c10::Stream> currentOf(c10::Device device) {
  if (device.is_cpu()) return {};
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

at::Tensor withoutMemory(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr, false);
  return tensorOver(std::move(none), device.type(), tensor, tensor.storage_offset());
}

// Without becoming one more owner, who might be the last.
bool isOf(const std::weak_ptr<SavedStorage>& pointer, const std::shared_ptr<SavedStorage>& storage) {
  return !pointer.owner_before(storage) && !storage.owner_before(pointer);
}

at::Tensor detached(const at::Tensor& tensor) {
  const at::AutoGradMode mode(false);
  return tensor.detach();
}

} // namespace

// ---- one storage

SavedStorage::SavedStorage(std::shared_ptr<SavedTensors> owner, c10::Storage storage, c10::Device target, Stream stream)
    : owner_(std::move(owner)),
      target_(target),
      stream_(stream),
      bytes_(storage.nbytes()),
      recorded_(currentOf(storage.device())),
      storage_(std::move(storage)),
      extent_{0, bytes_},
      restored_(c10::intrusive_ptr<c10::StorageImpl>()),
      key_(storage_.unsafeGetStorageImpl()) {}

SavedStorage::SavedStorage(std::shared_ptr<SavedTensors> owner, FetchedSource source, c10::Device target)
    : owner_(std::move(owner)),
      target_(target),
      bytes_(source.extent.bytes()),
      block_(std::move(source.block)),
      extent_(source.extent),
      restored_(c10::intrusive_ptr<c10::StorageImpl>()),
      key_(nullptr) {}

SavedStorage::~SavedStorage() {
  owner_->forget(*this);
}

c10::Storage SavedStorage::memory() {
  const std::lock_guard lock(mutex_);
  if (storage_) return storage_;
  const Pin ahead = std::move(ahead_); // until the fetch has found it
  const Stream now = Context::get().currentStream(target_.index());
  auto alive = restored_.lock();
  if (alive && restoredFor_ == now) return c10::Storage(std::move(alive));
  c10::Storage storage = fetchStorage(*static_cast<Block*>(block_.get_context()), extent_, target_);
  restored_ = storage.getWeakStorageImpl();
  restoredFor_ = now;
  return storage;
}

// Whether this is for the storage. One more stream that uses it makes it stay.
bool SavedStorage::isFor(const c10::Storage& storage, Stream stream) {
  const std::lock_guard lock(mutex_);
  if (!storage_ || !storage_.is_alias_of(storage)) return false;
  stays_ = stays_ || stream != stream_;
  return true;
}

SavedStorage::Place SavedStorage::place() {
  const std::lock_guard lock(mutex_);
  return placeNow();
}

// Under the mutex.
SavedStorage::Place SavedStorage::placeNow() const {
  if (!storage_ || stays_ || storage_.nbytes() != bytes_) return Place::Elsewhere; // or resized since
  return storage_.use_count() > 1 ? Place::Held : Place::Alone;
}

// False where it is not alone any more.
bool SavedStorage::goHome() {
  const std::lock_guard lock(mutex_);
  if (placeNow() != Place::Alone) return false;
  if (recorded_) c10::getDeviceAllocator(target_.type())->recordStream(storage_.data_ptr(), *recorded_);
  block_ = sendHome(storage_, Purpose::Activation, stream_);
  storage_ = {};
  return true;
}

void SavedStorage::fetchAhead(Stream stream) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (storage_ || ahead_ || restored_.use_count() > 0) return;
    ahead_ = Context::get().residency().fetchAhead(*static_cast<Block*>(block_.get_context()), extent_, stream);
  } catch (...) {
    // The fetch itself will say what is wrong.
  }
}

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
  auto result = tensorOver(storage_->memory(), kept_.device().type(), kept_, kept_.storage_offset());
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
  if (!backward) sendHomeWhatMayGo();
  if (auto source = sourceOf(tensor)) {
    const c10::Device target = pairedDevice(static_cast<c10::DeviceIndex>(source->device));
    return std::make_shared<SavedStorage>(shared_from_this(), std::move(*source), target);
  }
  return home && !backward && mayGoHome(tensor) ? noteDown(tensor) : nullptr;
}

std::shared_ptr<SavedStorage> SavedTensors::noteDown(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const c10::DeviceIndex index = indexOf(tensor);
  std::shared_ptr<SavedStorage> known;
  {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(storage.unsafeGetStorageImpl());
    if (found != known_.end()) known = found->second.lock();
  }
  const Stream stream = Context::get().currentStream(index);
  if (meter_) meter_->saving(pairedDevice(index));
  // Else another thread has just sent it home, and the address is another storage's.
  if (known && known->isFor(storage, stream)) return known;
  auto made = std::make_shared<SavedStorage>(shared_from_this(), storage, pairedDevice(index), stream);
  const std::lock_guard lock(mutex_);
  made->number_ = ++count_;
  made->place_ = order_.insert(order_.end(), made.get());
  known_[made->key_] = made;
  waiting_.push_back(made);
  return made;
}

// What is still held by others waits on, behind the rest.
void SavedTensors::lookForAlone() {
  for (int looked = 0; looked < kMostLookedAt; ++looked) {
    std::shared_ptr<SavedStorage> next;
    {
      const std::lock_guard lock(mutex_);
      while (!next && !waiting_.empty()) {
        next = waiting_.front().lock();
        waiting_.pop_front();
      }
    }
    if (!next) return;
    const auto place = next->place();
    const std::lock_guard lock(mutex_);
    if (place == SavedStorage::Place::Held) {
      waiting_.push_back(next);
    } else if (place == SavedStorage::Place::Alone) {
      alone_.push_back(next);
      next->isAlone_ = true;
      aloneBytes_ += next->bytes_;
    }
  }
}

void SavedTensors::sendHomeWhatMayGo() {
  lookForAlone();
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
    }
    try {
      if (Context::get().link()->capturing(next->stream_)) continue;
      if (hostBytes_ + next->bytes_ > options_.maxHostBytes) {
        doWithout(
            "those on the host may take " + std::to_string(options_.maxHostBytes) + " bytes, and take " +
            std::to_string(hostBytes_.load()) + " now");
        continue;
      }
      if (meter_ && !meter_->take(next->bytes_)) continue;
      const StepMeter::Wait wait(meter(), next->target_, true);
      if (!next->goHome()) continue;
    } catch (const c10::OutOfMemoryError& error) {
      doWithout(error.what_without_backtrace());
      continue;
    } catch (const Error& error) {
      doWithout(error.what());
      continue;
    }
    hostBytes_ += next->bytes_;
    const std::lock_guard lock(mutex_);
    next->isHome_ = true;
    const auto known = known_.find(next->key_);
    if (known != known_.end() && isOf(known->second, next)) known_.erase(known);
  }
}

void SavedTensors::doWithout(const std::string& why) {
  if (warned_.exchange(true)) return;
  TORCH_WARN("offload: saved tensors stay on the device: ", why, ". (Said once for each torch_offload.saved_tensors.)");
}

at::Tensor SavedTensors::unpack(const SavedTensor& saved) {
  if (!saved.storage_) return saved.unpack();
  const c10::Device device = saved.storage_->target_;
  if (meter_) meter_->asking(device);
  at::Tensor result;
  {
    const StepMeter::Wait wait(meter(), device, false);
    result = saved.unpack();
  }
  fetchAheadOf(*saved.storage_);
  return result;
}

void SavedTensors::fetchAheadOf(const SavedStorage& storage) {
  if (!storage.place_) return;
  const Context& context = Context::get();
  const std::size_t most = context.residency().ringBytes() / 2;
  std::vector<std::shared_ptr<SavedStorage>> next;
  {
    const std::lock_guard lock(mutex_);
    asked_[askedCount_++ % asked_.size()] = storage.number_;
    const std::uint64_t passed = *std::max_element(asked_.begin(), asked_.end());
    // What backward has been given, or has passed over: a node asks for what it saved in any order.
    std::erase_if(ahead_, [&](SavedStorage* ahead) {
      if (ahead->number_ != storage.number_ && ahead->number_ <= passed) return false;
      ahead->isAhead_ = false;
      aheadBytes_ -= ahead->bytes_;
      if (auto held = ahead->weak_from_this().lock()) next.push_back(std::move(held));
      return true;
    });
  }
  for (const auto& ahead : next) {
    const std::lock_guard lock(ahead->mutex_);
    ahead->ahead_ = {};
  }
  next.clear();
  {
    const std::lock_guard lock(mutex_);
    int looked = 0;
    for (auto place = *storage.place_; place != order_.begin() && next.size() < kMostAhead && looked < kMostLookedAt;
         ++looked) {
      SavedStorage& before = **--place;
      if (!before.isHome_ || before.isAhead_) continue;
      if (!ahead_.empty() && aheadBytes_ + before.bytes_ > most) break;
      auto held = before.weak_from_this().lock();
      if (!held) continue;
      before.isAhead_ = true;
      aheadBytes_ += before.bytes_;
      ahead_.push_back(&before);
      next.push_back(std::move(held));
    }
  }
  const Stream stream = context.currentStream(static_cast<c10::DeviceIndex>(storage.stream_.device));
  for (const auto& before : next) {
    before->fetchAhead(stream);
    {
      const std::lock_guard lock(mutex_);
      if (before->isAhead_) continue;
    }
    const std::lock_guard lock(before->mutex_); // backward has passed it over meanwhile
    before->ahead_ = {};
  }
}

void SavedTensors::forget(SavedStorage& storage) noexcept {
  const std::lock_guard lock(mutex_);
  if (!storage.place_) return;
  order_.erase(*storage.place_);
  if (storage.isHome_) {
    hostBytes_ -= storage.bytes_;
  } else {
    const auto known = known_.find(storage.key_);
    if (known != known_.end() && known->second.expired()) known_.erase(known);
  }
  if (storage.isAlone_) aloneBytes_ -= storage.bytes_;
  if (storage.isAhead_) {
    aheadBytes_ -= storage.bytes_;
    std::erase(ahead_, &storage);
  }
}

} // namespace offload
