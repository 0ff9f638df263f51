// What must hold of the cache at any time.
#include "core/error.h"
#include "core/residency.h"
#include "core/shared_memory.h"

#include <algorithm>

namespace offload {

// Under the mutex, as is the walk of all that calls it.
void Residency::require(const Block& block) const {
  auto require = [](bool holds, const char* what) {
    if (!holds) throw Error(std::string("offload: the cache is inconsistent: ") + what + ".");
  };
  require(block.hostVersion <= block.version, "host bytes are newer than the newest");
  require(block.issuing >= 0 && block.leases >= 0, "a Block counts less than none");
  require(block.claims >= 0 && block.claims <= block.issuing, "a job is none of those that a Block waits for");
  require(block.writers.isOrdered() && block.readers.isOrdered(), "a Block keeps a token that a later one implies");
  std::size_t listedAt = 0;
  std::size_t newest = 0;
  std::size_t dirty = 0;
  for (const auto& slot : block.slots) {
    require(slot->block == &block, "a Slot belongs to another Block");
    require(*slot->place == slot, "a Slot of a Block is not in the queue");
    require(std::count(block.slots.begin(), block.slots.end(), slot) == 1, "a Slot is listed twice");
    require(slot->extent.begin >= listedAt && slot->extent.bytes() <= block.longest, "a Slot is not where it is looked for");
    listedAt = slot->extent.begin;
    require(slot->extent.begin < slot->extent.end && slot->extent.end <= block.bytes, "an extent is not of its Block");
    require(slot->version <= block.version, "a Slot is newer than its Block");
    require(slot->state != SlotState::Gone && slot->buffer.data != nullptr, "a listed Slot has no memory");
    require(slot->readers.isOrdered(), "a Slot keeps a token that a later one implies");
    require(slot->pins > 0 || slot->version == block.version, "a stale Slot is kept");
    if (slot->version == block.version) ++newest;
    if (slot->share == Share::Dirty) ++dirty;
    require(
        slot->share != Share::Dirty || (slot->version == block.version && slot->extent == Extent{0, block.bytes}),
        "a Slot is charged as Dirty and does not hold all of the newest bytes");
  }
  require((block.hostVersion < block.version) == (dirty == 1), "the newest bytes are nowhere, or in two places");
  require(!block.shared || block.hostVersion == block.version, "bytes of a shared Block are on a device alone");
  require(!block.shared || block.seenVersion <= block.shared->version(), "a shared Block has seen what is still to come");
  require(dirty == 0 || newest == 1, "a Dirty Slot is not the only one of its version");
}

void Residency::validate(const Block& block) const {
  {
    const Lock lock(mutex_);
    require(block);
  }
  validate();
}

void Residency::validate() const {
  const Lock lock(mutex_);
  if (closed_) return; // what is let go then is left as it is
  for (const auto& dev : devices_) {
    dev->queue.validate([&](const std::shared_ptr<Slot>& slot) {
      if (slot->device != dev->index) throw Error("offload: a Slot is in another device's queue.");
      if (slot->block == nullptr) return;
      const auto& listed = slot->block->slots;
      if (std::find(listed.begin(), listed.end(), slot) == listed.end())
        throw Error("offload: a Block does not list its Slot.");
      require(*slot->block);
    });
  }
  for (const auto& [slot, streams] : deferred_) {
    if (slot->pins <= 0) throw Error("offload: an unpin is due for a Slot that nothing pins.");
  }
  for (const auto& slot : unreleased_) {
    if (slot->state != SlotState::Gone) throw Error("offload: memory is due back of a Slot that is in use.");
  }
}

} // namespace offload
