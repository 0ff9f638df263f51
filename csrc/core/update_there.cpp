// Changes of Blocks on the device, in the cache's own memory.
#include "core/error.h"
#include "core/residency.h"

#include <algorithm>
#include <climits>
#include <utility>

namespace offload {

bool Residency::updateThere(
    const std::vector<Claim>& claims, Stream stream, const std::function<void(const std::vector<void*>&)>& work) {
  const auto audited = audit("updateThere");
  hostErrors_.raise();
  if (link_.capturing(stream)) return false;
  settle();
  Device& dev = device(stream.device);
  look(dev);
  if (!mayBeThere(claims, dev)) return false;
  std::vector<Pin> pins;
  std::vector<void*> addresses;
  try {
    for (const auto& [block, access] : claims) {
      pins.push_back(pinNewest(dev, *block, {0, block->bytes}, stream));
      addresses.push_back(pins.back().data());
    }
  } catch (const OutOfMemory&) {
    return dismiss(claims, dev); // there was less room than we knew
  }
  std::vector<Token> before;
  if (!beginUpdate(claims, pins, before)) return false;
  bool changed = false;
  bool room = true;
  std::exception_ptr failure;
  try {
    dev.stalls.orderBefore(before, stream);
    changed = true;
    work(addresses);
  } catch (const OutOfMemory&) {
    changed = room = false;
  } catch (...) {
    failure = std::current_exception();
  }
  endUpdate(claims, pins, stream, changed);
  if (failure && changed) std::rethrow_exception(failure);
  return room ? changed : dismiss(claims, dev);
}

// Until there is another plan: not every step should ask for memory in vain.
bool Residency::dismiss(const std::vector<Claim>& claims, Device& dev) {
  const Lock lock(mutex_);
  for (const auto& [block, access] : claims) {
    if (access == Access::Write) dev.schedule.dismiss(*block);
  }
  return false;
}

// Whether the newest bytes are in the cache of the device, or may come into room that nothing takes just now.
bool Residency::mayBeThere(const std::vector<Claim>& claims, Device& dev) {
  const Lock lock(mutex_);
  std::vector<Block*> changed;
  std::size_t read = 0;
  std::size_t missing = 0;
  for (const auto& [block, access] : claims) {
    if (block->leases > 0 || block->claims > 0 || block->shared || block->file || block->bytes == 0) return false;
    const auto dirty = dirtyOf(*block);
    if (dirty && dirty->device != dev.index) return false;
    const auto slot = newestSlot(*block, {0, block->bytes}, dev.index);
    if (access == Access::Read) {
      read += block->bytes;
    } else {
      if (block->issuing > 0 || (slot && !mayChange(*slot, 0))) return false;
      changed.push_back(block);
    }
    const bool due = !slot || (access == Access::Write && slot->share == Share::Passing);
    if (due) missing += slot ? slot->buffer.bytes : block->bytes;
  }
  if (changed.empty() || !dev.schedule.admit(changed, read, dev.planned)) return false;
  return missing == 0 || fits(dev, missing);
}

// Nobody but so many Pins of the caller's may hold what is to be written, as it would change under him; and memory of somebody else's
// may have been kept by anybody.
bool Residency::mayChange(const Slot& slot, int pins) {
  return slot.pins == pins && slot.state == SlotState::Clean && slot.buffer.owner == nullptr;
}

// Tells what the work has to wait for.
bool Residency::beginUpdate(const std::vector<Claim>& claims, const std::vector<Pin>& pins, std::vector<Token>& before) {
  const Lock lock(mutex_);
  for (std::size_t k = 0; k < claims.size(); ++k) {
    const auto& [block, access] = claims[k];
    const Slot& slot = *pins[k].slot_;
    before.push_back(slot.ready);
    if (access == Access::Read) continue;
    if (!mayChange(slot, 1) || slot.block != block || !holdsNewest(slot, *block) || slot.extent != Extent{0, block->bytes} ||
        block->issuing > 0 || block->leases > 0)
      return false;
  }
  for (std::size_t k = 0; k < claims.size(); ++k) {
    const auto& [block, access] = claims[k];
    if (access == Access::Read) continue;
    ++block->issuing;
    pins[k].slot_->readers.appendTo(before);
  }
  return true;
}

// It goes home at once, so that it may be given up whenever PyTorch's allocator is short of memory. What the Link refuses stays Dirty.
void Residency::endUpdate(const std::vector<Claim>& claims, const std::vector<Pin>& pins, Stream stream, bool changed) {
  Device& dev = device(stream.device);
  const Token made = changed ? events_.record(stream) : Token();
  Slots retired;
  {
    const Lock lock(mutex_);
    if (changed) ++dev.queue.stats.updates;
    for (std::size_t k = 0; k < claims.size(); ++k) {
      const auto& [block, access] = claims[k];
      if (access == Access::Read) {
        if (changed && block->purpose == Purpose::Gradient && block->derivedFrom != nullptr && block->adoptions > 0) {
          writesOfGradients_[block->derivedFrom] = UINT_MAX; // the host hasn't read it, and doesn't
          block->adoptions = 0;
        }
        continue;
      }
      --block->issuing;
      if (!changed) continue;
      const auto& slot = pins[k].slot_;
      slot->version = ++block->version;
      slot->ready = made;
      slot->become(SlotState::Dirty);
      dev.queue.move(slot, Share::Dirty);
      retireStale(*block, retired);
    }
  }
  issued_.notify_all();
  release(retired);
  Lock lock(mutex_);
  for (std::size_t k = 0; k < claims.size() && changed; ++k) {
    const auto& [block, access] = claims[k];
    if (access == Access::Read) continue;
    awaitIssued(lock, *block); // somebody else may be sending it home
    if (dirtyOf(*block) == pins[k].slot_) tryWriteHome(lock, pins[k].slot_);
  }
  lock.unlock();
  for (const auto& [block, access] : claims) {
    if (changed && access == Access::Write) goOnAhead(*block);
  }
}

// What is changed stays Dirty, as the result that it replaces would: a copy of all of it for each part would cost as much as the whole.
bool Residency::changeThere(Block& block, Stream stream, const std::function<bool(void* data, void* owner)>& work) {
  const auto audited = audit("changeThere", &block);
  hostErrors_.raise();
  if (block.shared || block.file || link_.capturing(stream)) return false;
  settle();
  Device& dev = device(stream.device);
  look(dev);
  std::shared_ptr<Slot> slot;
  std::vector<Token> before;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    slot = newestSlot(block, {0, block.bytes}, dev.index);
    if (!slot || slot->pins > 0 || block.leases > 0) return false;
    slot->unused = false;
    dev.queue.pin(slot);
    ++block.issuing;
    before.push_back(slot->ready);
    slot->readers.appendTo(before);
  }
  const Pin pin(*this, slot, slot->data, stream);
  bool changed = false;
  std::exception_ptr failure;
  try {
    dev.stalls.orderBefore(before, stream);
    changed = true;
    changed = work(slot->data, slot->buffer.owner.get());
  } catch (...) {
    failure = std::current_exception();
  }
  const Token made = changed ? events_.record(stream) : Token();
  Slots retired;
  {
    Lock lock(mutex_);
    --block.issuing;
    issued_.notify_all();
    if (changed) {
      slot->version = ++block.version;
      slot->ready = made;
      if (slot->state == SlotState::Clean) slot->become(SlotState::Dirty);
      dev.queue.move(slot, Share::Dirty);
      ++block.adoptions;
      retireStale(block, retired);
      findRoomFor(lock, dev, slot, false, retired);
    }
  }
  release(retired);
  if (failure) std::rethrow_exception(failure);
  return changed;
}

} // namespace offload
