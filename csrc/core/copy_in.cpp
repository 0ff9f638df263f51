// How extents get device memory and their bytes.
#include "core/error.h"
#include "core/residency.h"

#include <utility>

namespace offload {

// A new Slot for what no device has. Lets go of the mutex meanwhile, and releases what has been retired; when this throws, the mutex
// is not held. `tooLarge` is for a fetch that is due now: whether it is worth a word about the ring.
Pin Residency::copyToDevice(
    Lock& lock, Device& dev, Block& block, Extent extent, const StreamSet& streams, Slots& retired, bool* tooLarge) {
  const std::size_t shift = (block.address() + extent.begin) % kAlignment;
  auto slot = std::make_shared<Slot>();
  slot->extent = extent;
  slot->device = dev.index;
  slot->version = block.version;
  slot->host = static_cast<const std::byte*>(block.data) + extent.begin;
  slot->purpose = block.purpose;
  slot->derivedFrom = block.derivedFrom;
  slot->buffer.bytes = extent.bytes() + shift;
  if (block.file) retireStale(block, retired); // of a read that has failed
  const std::size_t bytes = slot->buffer.bytes;
  const bool room = fits(dev, bytes);
  const bool stays = room && dev.schedule.keeps(block, extent, room);
  dev.ring = ring(bytes);
  if (tooLarge != nullptr) *tooLarge = !stays && ringIsSet_ && 2 * bytes > ringBytes_ && !std::exchange(warned_, true);
  if (dev.queue.makeRoom(stays ? 0 : bytes, dev.ring, retired)) pauseLending(dev);
  dev.queue.add(slot, stays ? Share::Staying : Share::Passing);
  if (!stays) dev.schedule.missed(extent.bytes());
  std::vector<Token> after;
  block.writers.appendTo(after);
  ++block.issuing;
  lock.unlock();

  release(retired);
  Pin pinned(*this, slot, nullptr, streams); // gives the Slot up if anything throws
  TokenSet reads;
  std::exception_ptr failure;
  try {
    // All that is left to write of it: its bytes are charged.
    slot->buffer.home = dev.transfer.deviceBound();
    // What is only foreseen must not empty the cache.
    slot->buffer.data = tooLarge != nullptr ? allocate(dev, bytes) : link_.allocate(bytes, slot->buffer.home);
    moveElsewhere(*slot);
    slot->data = static_cast<std::byte*>(slot->buffer.data) + shift;
    const Activity activity = tooLarge != nullptr ? Activity::Fetch : Activity::Prefetch;
    const auto span = observe({activity, dev.index, slot->host, extent.bytes(), block.purpose, block.derivedFrom});
    copyIn(*slot, block, dev, after, reads);
  } catch (...) {
    failure = std::current_exception();
  }

  lock.lock();
  --block.issuing;
  block.readers.add(reads); // the copy may be on its way although something failed
  if (!failure) {
    slot->become(SlotState::Clean);
    slot->block = &block;
    listSlot(slot);
    dev.lastCopy = slot->ready;
    pinned.data_ = slot->data;
  } else {
    lock.unlock();
  }
  issued_.notify_all();
  if (failure) std::rethrow_exception(failure);
  return pinned;
}

void Residency::copyIn(Slot& slot, const Block& block, Device& dev, const std::vector<Token>& after, TokenSet& reads) {
  if (options_.poison) link_.fill(slot.buffer.data, 0xFF, slot.buffer.bytes, slot.buffer.home);
  if (block.file && block.file->inFile()) {
    block.file->prepare(Access::Read);
    slot.fileFailures = block.file->failures();
    slot.ready = dev.transfer.fileToDevice(slot.data, block.file, slot.extent, after, reads, hostErrors_);
  } else {
    slot.ready = dev.transfer.toDevice(slot.data, slot.host, slot.extent.bytes(), memoryOf(block), after, reads);
  }
}

// Of page-locked memory, where it is more than one.
void Residency::copyAllIn(const std::vector<Copying>& batch, Device& dev, const std::vector<Token>& after, TokenSet& reads) {
  if (batch.size() == 1) return copyIn(*batch[0].slot, *batch[0].block, dev, after, reads);
  std::vector<Copy> copies;
  for (const auto& [slot, block] : batch) {
    if (options_.poison) link_.fill(slot->buffer.data, 0xFF, slot->buffer.bytes, slot->buffer.home);
    copies.push_back({slot->data, slot->host, slot->extent.bytes()});
  }
  const Token done = dev.transfer.allToDevice(std::move(copies), after, reads);
  for (const auto& [slot, block] : batch) slot->ready = done;
}

void* Residency::allocate(Device& dev, std::size_t bytes) {
  try {
    return link_.allocate(bytes, dev.transfer.deviceBound());
  } catch (const OutOfMemory&) {
    if (emptyCache(dev.index) == 0) throw;
  }
  return link_.allocate(bytes, dev.transfer.deviceBound());
}

// In poison mode: bytes that come again come to another place than last time, where the device has one. So who kept an address for
// longer than its Pin finds poison, or other bytes, and never the right ones by chance.
void Residency::moveElsewhere(Slot& slot) {
  if (!options_.poison) return;
  DeviceBuffer& buffer = slot.buffer;
  const auto key = std::pair(slot.device, slot.host);
  const auto wasHere = [&] {
    Lock lock(mutex_);
    const auto last = places_.find(key);
    return last != places_.end() && last->second == buffer.data;
  };
  if (wasHere()) {
    try {
      void* const other = link_.allocate(buffer.bytes, buffer.home);
      link_.free(std::exchange(buffer.data, other), buffer.home);
    } catch (const OutOfMemory&) {
      // There is no other place.
    }
  }
  Lock lock(mutex_);
  places_[key] = buffer.data;
}

} // namespace offload
