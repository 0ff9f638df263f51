#include "core/slot.h"

#include <algorithm>

namespace offload {
namespace {

bool beginsBefore(std::size_t begin, const std::shared_ptr<Slot>& slot) {
  return begin < slot->extent.begin;
}

} // namespace

void listSlot(const std::shared_ptr<Slot>& slot) {
  Block& block = *slot->block;
  auto& slots = block.slots;
  slots.insert(std::upper_bound(slots.begin(), slots.end(), slot->extent.begin, beginsBefore), slot);
  block.longest = slots.size() == 1 ? slot->extent.bytes() : std::max(block.longest, slot->extent.bytes());
}

void unlistSlot(const std::shared_ptr<Slot>& slot) noexcept {
  auto& slots = slot->block->slots;
  for (auto at = std::upper_bound(slots.begin(), slots.end(), slot->extent.begin, beginsBefore); at != slots.begin();) {
    if (*--at == slot) {
      slots.erase(at);
      return;
    }
    if ((*at)->extent.begin < slot->extent.begin) return; // it was not listed
  }
}

std::shared_ptr<Slot> newestSlot(const Block& block, Extent extent, int device) noexcept {
  const auto& slots = block.slots;
  const auto isIt = [&](const Slot& slot) {
    return slot.device == device && slot.extent.contains(extent) && holdsNewest(slot, block);
  };
  // Where all of the Block is there, that comes first.
  if (!slots.empty() && isIt(*slots.front())) return slots.front();
  for (auto at = std::upper_bound(slots.begin(), slots.end(), extent.begin, beginsBefore); at != slots.begin();) {
    const auto& slot = *--at;
    if (slot->extent.begin + block.longest < extent.end) break; // nor is any before it long enough
    if (isIt(*slot)) return slot;
  }
  return nullptr;
}

} // namespace offload
