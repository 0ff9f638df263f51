// Memory of several processes: the Arena counts it, and page-locks it within its limits.
#include "core/arena.h"
#include "core/error.h"

#include <algorithm>

namespace offload {

// What was let go has its descriptor until it is collected.
void Arena::requireDescriptor() {
  try {
    SharedMemory::requireDescriptor();
  } catch (const Error&) {
    if (!collect(Poll::Wait)) throw;
    SharedMemory::requireDescriptor();
  }
}

std::shared_ptr<SharedMemory> Arena::share(std::size_t bytes, Born born) {
  requireDescriptor();
  return mapped(SharedMemory::create(bytes, born));
}

std::shared_ptr<SharedMemory> Arena::openShared(int descriptor) {
  return mapped(SharedMemory::open(descriptor));
}

std::shared_ptr<SharedMemory> Arena::mapped(std::unique_ptr<SharedMemory> memory) {
  collect(Poll::Some); // who only receives memory, and lets it go, allocates none
  memory->pinned = lockShared(*memory);
  {
    const Lock lock(mutex_);
    stats_.shared += memory->mappedBytes();
    if (memory->pinned) stats_.pinned += memory->mappedBytes();
  }
  return {memory.release(), [this](SharedMemory* gone) { unmap(gone); }};
}

void Arena::unmap(SharedMemory* memory) noexcept {
  const std::size_t bytes = memory->mappedBytes();
  const std::size_t locked = memory->pinned ? bytes : 0;
  if (memory->pinned) {
    {
      const Lock lock(mutex_);
      budget_.leave(bytes);
    }
    link_->unregisterHost(memory->mapped(), bytes);
  }
  delete memory;
  const Lock lock(mutex_);
  stats_.shared -= bytes;
  stats_.pinned -= locked;
  budget_.remove(locked);
}

// Every process locks its own mapping. That the pages are there already, and locked by others, is not known here, so they count.
bool Arena::lockShared(const SharedMemory& memory) {
  if (wanted_ != HostKind::Locked) return false;
  const std::size_t bytes = memory.mappedBytes();
  look();
  const auto shortage = [&] {
    const Lock lock(mutex_);
    return bytes - std::min(bytes, budget_.room());
  };
  if (shortage() > 0) collect(Poll::All);
  if (const std::size_t missing = shortage(); missing > 0) release(0, missing);
  bool granted = false;
  {
    const Lock lock(mutex_);
    granted = budget_.room() >= bytes;
    if (granted) budget_.add(bytes);
  }
  if (granted && link_->registerHost(memory.mapped(), bytes)) {
    const Lock lock(mutex_);
    budget_.settle(bytes);
    return true;
  }
  if (granted) {
    const Lock lock(mutex_);
    budget_.remove(bytes);
    budget_.refuse(bytes);
  }
  warn(bytes);
  return false;
}

} // namespace offload
