#include "core/slot_queue.h"

#include "core/error.h"

#include <algorithm>

namespace offload {

void SlotQueue::add(Slot& slot) {
  slot.pins = 1;
  stats.slotBytes += slot.buffer.bytes;
  stats.pinnedBytes += slot.buffer.bytes;
  stats.slotBytesPeak = std::max(stats.slotBytesPeak, stats.slotBytes);
}

void SlotQueue::pin(Slot& slot) {
  if (slot.pins++ > 0) return;
  stats.pinnedBytes += slot.buffer.bytes;
  idle_.erase(slot.idle);
  slot.isIdle = false;
}

void SlotQueue::unpin(const std::shared_ptr<Slot>& slot, bool keep, Slots& retired) {
  if (--slot->pins > 0) return;
  stats.pinnedBytes -= slot->buffer.bytes;
  const bool newest = slot->block != nullptr && slot->version == slot->block->version;
  if (keep && newest && slot->state == SlotState::Clean) {
    slot->idle = idle_.insert(idle_.end(), slot);
    slot->isIdle = true;
  } else {
    retire(slot, retired);
  }
}

void SlotQueue::retire(std::shared_ptr<Slot> slot, Slots& retired) {
  if (slot->isIdle) {
    slot->isIdle = false;
    idle_.erase(slot->idle);
  }
  if (slot->block != nullptr) std::erase(slot->block->slots, slot);
  slot->become(SlotState::Gone);
  stats.slotBytes -= slot->buffer.bytes;
  ++stats.evictions;
  retired.push_back(std::move(slot));
}

void SlotQueue::makeRoom(std::size_t bytes, std::size_t budget, Slots& retired) {
  while (stats.slotBytes + bytes > budget && !idle_.empty()) retire(idle_.front(), retired);
}

void SlotQueue::validate() const {
  auto require = [](bool holds, const char* what) {
    if (!holds) throw Error(std::string("offload: the queue of Slots is inconsistent: ") + what);
  };
  std::size_t idleBytes = 0;
  for (const auto& slot : idle_) {
    require(slot->isIdle && slot->pins == 0, "a Slot in it is pinned");
    require(slot->state == SlotState::Clean && slot->buffer.data != nullptr, "a Slot in it holds nothing");
    idleBytes += slot->buffer.bytes;
  }
  require(idleBytes + stats.pinnedBytes == stats.slotBytes, "bytes are miscounted");
}

} // namespace offload
