#include "core/held_copies.h"

#include "core/error.h"

namespace offload {

std::shared_ptr<HeldCopy> HeldCopies::get(
    Block& block, Extent extent, std::size_t most, const std::function<void*(std::size_t)>& allocate) {
  const Key key{&block, extent.begin, extent.end};
  const std::size_t bytes = extent.bytes() + kAlignment; // whatever the shift is
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(known_, [](const auto& entry) { return entry.second.copy.expired(); });
    if (const auto found = known_.find(key); found != known_.end()) {
      if (auto copy = found->second.copy.lock()) return copy;
    }
    if (bytesLocked() + bytes > most) return nullptr;
  }
  Staging::BufferPtr buffer;
  try {
    buffer = staging_->add(allocate(bytes), bytes, true);
  } catch (const OutOfMemory&) {
    return nullptr;
  }
  auto* const data = static_cast<std::byte*>(buffer->data) + (block.address() + extent.begin) % kAlignment;
  const auto made = std::make_shared<HeldCopy>(HeldCopy{block, extent, std::move(buffer), data});
  const std::lock_guard lock(mutex_);
  Known& known = known_[key];
  if (auto copy = known.copy.lock()) return copy; // another thread's
  known = {made, bytes};
  return made;
}

std::size_t HeldCopies::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytesLocked();
}

std::size_t HeldCopies::bytesLocked() const {
  std::size_t sum = 0;
  for (const auto& [key, known] : known_) {
    if (!known.copy.expired()) sum += known.bytes; // nothing may go under the mutex
  }
  return sum;
}

} // namespace offload
