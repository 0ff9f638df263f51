#include "autograd/saved_storage.h"

#include "autograd/saved_order.h"
#include "autograd/saved_tensors.h"
#include "core/forked.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace offload {
namespace {

// The stream that work goes to now; none on the CPU, whose memory belongs to no stream.
std::optional<c10::Stream> currentOf(c10::Device device) {
  if (device.is_cpu()) return {};
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Whether its storage, which may have been resized, has all of it.
bool isWhole(const at::Tensor& tensor) {
  return extentOf(tensor).end <= tensor.storage().nbytes();
}

} // namespace

SavedStorage::SavedStorage(std::shared_ptr<SavedTensors> owner, const at::Tensor& tensor, c10::Device target, Stream stream)
    : owner_(std::move(owner)),
      target_(target),
      stream_(stream),
      bytes_(tensor.storage().nbytes()),
      recorded_(currentOf(tensor.storage().device())),
      storage_(tensor.storage()),
      stays_(!isWhole(tensor)),
      saved_(extentOf(tensor).aligned()),
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
  if (isForked()) return;
  const bool held = storage_ && storage_.use_count() > 1;
  SavedOrder::of(target_).forget(*this, held ? 0 : storage_ ? bytes_ : extent_.bytes());
  owner_->forget(*this);
}

// Under the mutex.
c10::Storage SavedStorage::memory() {
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

at::Tensor SavedStorage::restore(const at::Tensor& like) {
  const std::lock_guard lock(mutex_);
  // What is left out of the Block.
  const auto left = storage_ ? 0 : static_cast<std::int64_t>(saved_.begin / static_cast<std::size_t>(like.element_size()));
  // An empty tensor may begin anywhere.
  return tensorOver(memory(), like.device().type(), like, std::max<std::int64_t>(like.storage_offset() - left, 0));
}

// Whether the tensor's storage is this. One more stream that uses it makes it stay.
bool SavedStorage::save(const at::Tensor& tensor, Stream stream) {
  const std::lock_guard lock(mutex_);
  if (!storage_ || !storage_.is_alias_of(tensor.storage())) return false;
  stays_ = stays_ || stream != stream_ || !isWhole(tensor);
  const Extent more = extentOf(tensor).aligned();
  if (saved_.bytes() == 0) {
    saved_ = more;
  } else if (more.bytes() > 0) {
    saved_ = {std::min(saved_.begin, more.begin), std::max(saved_.end, more.end)};
  }
  return true;
}

std::size_t SavedStorage::bytesToSend() {
  const std::lock_guard lock(mutex_);
  return saved_.bytes();
}

SavedStorage::Place SavedStorage::place() {
  const std::lock_guard lock(mutex_);
  return placeNow();
}

// Under the mutex.
SavedStorage::Place SavedStorage::placeNow() const {
  if (!storage_ || stays_ || storage_.nbytes() != bytes_) return Place::Elsewhere; // or resized since
  return storage_.use_count() > 1 || saved_.bytes() == 0 ? Place::Held : Place::Alone;
}

// False where it is not alone any more.
bool SavedStorage::goHome() {
  const std::lock_guard lock(mutex_);
  if (placeNow() != Place::Alone) return false;
  if (recorded_) c10::getDeviceAllocator(target_.type())->recordStream(storage_.data_ptr(), *recorded_);
  block_ = sendHome(storage_, saved_, Purpose::Activation, stream_, owner_->options().pinMemory);
  extent_ = {0, saved_.bytes()};
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

} // namespace offload
