#include "core/held_copies.h"

#include "core/error.h"
#include "core/forked.h"

namespace offload {
namespace {

std::size_t bytesFor(Extent extent) {
  return extent.bytes() + kAlignment; // whatever the shift is
}

} // namespace

std::shared_ptr<HeldCopy> HeldCopies::get(
    Block& block, Extent extent, std::size_t most, const std::function<void*(std::size_t)>& allocate) {
  const Key key{&block, extent.begin, extent.end};
  const std::size_t bytes = bytesFor(extent);
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = known_.find(key); found != known_.end()) {
      if (auto copy = found->second.lock()) return copy;
    }
    if (bytes_ + bytes > most) return nullptr;
  }
  Staging::BufferPtr buffer;
  try {
    buffer = staging_->add(allocate(bytes), bytes, true);
  } catch (const OutOfMemory&) {
    return nullptr;
  }
  auto* const data = static_cast<std::byte*>(buffer->data) + (block.address() + extent.begin) % kAlignment;
  const std::shared_ptr<HeldCopy> made(
      new HeldCopy{block, extent, std::move(buffer), data}, [this](HeldCopy* gone) { destroy(gone); });
  const std::lock_guard lock(mutex_);
  const auto [known, added] = known_.try_emplace(key);
  if (auto copy = known->second.lock()) return copy; // another thread's
  known->second = made;
  if (added) bytes_ += bytes;
  return made;
}

void HeldCopies::destroy(HeldCopy* copy) noexcept {
  if (isForked()) return;
  const Key key{&copy->block, copy->extent.begin, copy->extent.end};
  const std::size_t bytes = bytesFor(copy->extent);
  delete copy;
  const std::lock_guard lock(mutex_);
  const auto known = known_.find(key);
  if (known == known_.end() || !known->second.expired()) return; // it has been made anew
  known_.erase(known);
  bytes_ -= bytes;
}

std::size_t HeldCopies::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

} // namespace offload
