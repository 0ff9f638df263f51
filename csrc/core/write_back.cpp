// How results become the newest bytes of a Block, and how these come home.
#include "core/residency.h"
#include "core/shared_memory.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

constexpr std::size_t kResultsForEachFetch = 16; // that are looked through

} // namespace

// A Slot that no Block lists yet, with one Pin.
std::shared_ptr<Slot> Residency::takeResult(Device& dev, const Block& block, DeviceBuffer buffer) {
  auto slot = std::make_shared<Slot>();
  slot->extent = {0, block.bytes};
  slot->device = dev.index;
  slot->state = SlotState::Dirty;
  slot->buffer = std::move(buffer);
  slot->data = static_cast<std::byte*>(slot->buffer.data);
  slot->host = block.data;
  slot->purpose = block.purpose;
  slot->derivedFrom = block.derivedFrom;
  Slots retired;
  {
    Lock lock(mutex_);
    // It has its memory already, and soon leaves the ring: no reason to give up what the next operation wants.
    const std::size_t bytes = slot->buffer.bytes;
    if (dev.queue.dropPassed(bytes, std::max(dev.ring, ring(bytes)), retired)) pauseLending(dev);
    dev.queue.add(slot, Share::Passing);
  }
  release(retired);
  return slot;
}

void Residency::adopt(Block& block, DeviceBuffer buffer, Stream producer) {
  const auto audited = audit("adopt", &block);
  if (block.shared || block.bytes == 0) return writeThrough(block, std::move(buffer), producer);
  prepareForWrite(block);
  Device& dev = device(producer.device);
  const auto slot = takeResult(dev, block, std::move(buffer));
  Pin pinned(*this, slot, slot->data, producer); // gives the memory up if anything throws
  Slots retired;
  refuseCapture(producer, "keep a result");
  settle();
  look(dev);
  slot->ready = events_.record(producer);
  std::vector<Token> leasedUntil;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    slot->block = &block;
    slot->version = ++block.version;
    retireStale(block, retired);
    listSlot(slot);
    dev.queue.move(slot, Share::Dirty);
    if (isAddend(block)) dev.queue.setAddend(*slot);
    ++block.adoptions;
    if (!retired.empty()) {
      lock.unlock();
      release(retired);
      lock.lock();
    }
    const bool leased = block.leases > 0;
    findRoomFor(lock, dev, slot, leased, retired);
    if (leased) block.writers.appendTo(leasedUntil);
    slot->readers.add(slot->ready); // its producer alone has used it, and may be on another stream than the memory's home
    if (!closed_) letGo(slot, retired);
    pinned.slot_ = nullptr;
  }
  release(retired);
  for (const Token& token : leasedUntil) token.wait();
}

// For what has just become Dirty; it goes home where it is due, or has to. Under a lease it does, or throws.
void Residency::findRoomFor(Lock& lock, Device& dev, const std::shared_ptr<Slot>& slot, bool leased, Slots& retired) {
  const Block& block = *slot->block;
  awaitIssued(lock, block);
  if (dirtyOf(block) == slot) {
    if (leased) {
      writeHome(lock, slot);
    } else if (block.goesHome || isLastWrite(block) || (block.purpose == Purpose::Gradient && !isWithin(dev))) {
      tryWriteHome(lock, slot);
    }
  }
  if (block.purpose != Purpose::Gradient) makeRoomForResult(lock, dev, retired);
  spill(lock, dev);
}

void Residency::giveUpLeaving(int index, Purpose purpose, std::size_t most) {
  const auto audited = audit("giveUpLeaving");
  Slots retired;
  {
    Lock lock(mutex_);
    device(index).queue.dropLeaving(purpose, most, retired);
  }
  release(retired);
}

void Residency::store(Block& block, Extent extent, const void* source, Stream producer) {
  const auto audited = audit("store", &block);
  refuseCapture(producer, "copy into an offload tensor");
  settle();
  if (extent.bytes() == 0) return;
  requireWithin(block, extent);
  prepareForWrite(block);
  Device& dev = device(producer.device);
  std::vector<Token> after{events_.record(producer)};
  Slots retired;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    // What all of is overwritten need not come home before.
    const bool whole = extent == Extent{0, block.bytes};
    for (auto dirty = dirtyOf(block); dirty && !whole; dirty = dirtyOf(block)) {
      writeHome(lock, dirty);
      awaitIssued(lock, block);
    }
    block.writers.appendTo(after);
    block.readers.appendTo(after);
    ++block.issuing;
  }
  TokenSet home;
  std::exception_ptr failure;
  try {
    auto* const host = static_cast<std::byte*>(block.data) + extent.begin;
    const auto span = observe({Activity::Store, producer.device, host, extent.bytes(), block.purpose, block.derivedFrom});
    const Token copy = dev.transfer.toHost(host, source, extent.bytes(), memoryOf(block), after, home);
    dev.stalls.orderBefore(copy, extent.bytes(), producer);
  } catch (...) {
    failure = std::current_exception();
  }
  bool awaited = false;
  {
    Lock lock(mutex_);
    --block.issuing;
    block.writers.add(home);
    // What failed before any byte could change has written nothing; and where the newest bytes are on the device, they still are.
    if (!failure || !(home.empty() || dirtyOf(block))) {
      block.hostVersion = ++block.version;
      retireStale(block, retired);
    }
    awaited = block.leases > 0 || block.shared;
  }
  issued_.notify_all();
  release(retired);
  // After a failure the source may go as soon as the caller learns of it.
  if (awaited || failure) home.wait();
  if (block.shared) block.shared->bump();
  if (failure) std::rethrow_exception(failure);
}

void Residency::beforeChange(const Pin& pin, Stream stream) {
  if (link_.capturing(stream)) return; // what a graph fetches is its own
  const auto& slot = pin.slot_;
  if (!slot) return;
  std::vector<Token> before;
  {
    Lock lock(mutex_);
    while (slot->block != nullptr && slot->state == SlotState::WritingBack) awaitIssued(lock, *slot->block);
    slot->mayChange = true;
    before.push_back(slot->ready);
    slot->readers.appendTo(before);
  }
  device(stream.device).stalls.orderBefore(before, stream);
}

void Residency::bringHome(const Pin& pin, Stream producer) {
  const auto audited = audit("bringHome");
  const std::shared_ptr<Slot> slot = pin.slot_;
  Block* block = nullptr;
  std::uint64_t before = 0;
  Slots retired;
  {
    const Lock lock(mutex_);
    if (!slot || slot->block == nullptr) return;
    block = slot->block;
    noticeShared(*block, retired);
    before = block->version;
    // What a job is about to write is as good as written.
    if (!holdsNewest(*slot, *block) || block->writing > 0) block = nullptr;
  }
  release(retired);
  if (block == nullptr) return;
  try {
    refuseCapture(producer, "write to an offload tensor");
    if (stayDirty(slot, *block, events_.record(producer))) return;
    store(*block, slot->extent, slot->data, producer);
    const Token written = events_.record(producer);
    const Lock lock(mutex_);
    if (slot->block != block || block->version != before + 1) return;
    slot->version = block->version;
    slot->ready = written;
    if (slot->state != SlotState::Dirty) return;
    slot->become(SlotState::WritingBack); // which the store was
    slot->become(SlotState::Clean);
  } catch (...) {
    forsake(slot, *block, producer);
    throw;
  }
}

// What is on the device alone is the newest still, and stays so.
bool Residency::stayDirty(const std::shared_ptr<Slot>& slot, Block& block, const Token& written) {
  Slots retired;
  {
    const Lock lock(mutex_);
    if (slot->block != &block || slot->state != SlotState::Dirty || !holdsNewest(*slot, block)) return false;
    slot->version = ++block.version;
    slot->ready = written;
    retireStale(block, retired);
  }
  release(retired);
  return true;
}

// A change in place could not be brought home. Bytes that are no copy of the host's any more are nobody's; those that are on the device
// alone are all there is, and what reads them comes after the change.
void Residency::forsake(const std::shared_ptr<Slot>& slot, const Block& block, Stream producer) noexcept {
  std::optional<Token> written;
  try {
    if (!link_.capturing(producer)) written = events_.record(producer);
  } catch (...) {
    // Whoever calls the driver next is told.
  }
  const Lock lock(mutex_);
  if (slot->block != &block) return;
  if (slot->share == Share::Dirty) {
    if (written) slot->ready = *written;
    return;
  }
  device(slot->device).queue.move(slot, Share::Passing);
  unlistSlot(slot);
  slot->block = nullptr;
}

std::shared_ptr<void> Residency::takeBack(Pin& pin, Stream stream) {
  const auto audited = audit("takeBack");
  Slots retired;
  std::shared_ptr<void> owner;
  {
    const Lock lock(mutex_);
    const auto& slot = pin.slot_;
    if (!slot || slot->block != nullptr || slot->pins != 1 || !slot->buffer.owner || slot->buffer.home != stream)
      return nullptr;
    const auto isHere = [stream](const Token& token) { return token.knownDone() || token.isOn(stream); };
    if (!pin.streams_.isOnly(stream) || !std::ranges::all_of(slot->readers.all(), isHere)) return nullptr;
    device(slot->device).queue.unpin(slot, false, retired);
    owner = std::exchange(slot->buffer, {}).owner;
  }
  pin.slot_ = nullptr;
  return owner;
}

Block* Residency::retainSource(const Pin& pin) {
  Lock lock(mutex_);
  const auto& slot = pin.slot_;
  if (!slot || slot->block == nullptr || !holdsNewest(*slot, *slot->block) || slot->block->writing > 0) return nullptr;
  // The last owner may be on his way to forget(), which waits for this mutex; he is not to be joined.
  int owners = slot->block->owners.load(std::memory_order_relaxed);
  while (owners > 0) {
    if (slot->block->owners.compare_exchange_weak(owners, owners + 1, std::memory_order_relaxed)) return slot->block;
  }
  return nullptr;
}

// What adopt() is for a Shared Block, or an empty one: nothing of it stays on the device. The memory goes after its producer, whether
// the copy succeeds or not.
void Residency::writeThrough(Block& block, DeviceBuffer buffer, Stream producer) {
  const auto slot = takeResult(device(producer.device), block, std::move(buffer));
  const Pin pinned(*this, slot, slot->data, producer);
  store(block, {0, block.bytes}, slot->data, producer);
}

// What is counted in the shared header since the last look, by whichever process, is one more version here.
void Residency::noticeShared(Block& block, Slots& retired) {
  if (!block.shared) return;
  const std::uint64_t now = block.shared->version();
  if (now == block.seenVersion) return;
  block.seenVersion = now;
  block.hostVersion = ++block.version;
  retireStale(block, retired);
}

// Enqueues the copy of a Dirty Slot's bytes to the host. Lets go of the mutex meanwhile; the Block can't go, since whoever destroys
// it waits for what is being issued.
void Residency::writeHome(Lock& lock, const std::shared_ptr<Slot>& slot) {
  Block& block = *slot->block;
  Device& dev = device(slot->device);
  std::vector<Token> after{slot->ready};
  block.writers.appendTo(after);
  block.readers.appendTo(after);
  slot->become(SlotState::WritingBack);
  dev.queue.pin(slot);
  ++block.issuing;
  lock.unlock();
  TokenSet home;
  std::exception_ptr failure;
  try {
    if (block.file) block.file->prepare(Access::Write);
    const auto span = observe({Activity::WriteBack, slot->device, block.data, block.bytes, block.purpose, block.derivedFrom});
    dev.transfer.toHost(block.data, slot->data, block.bytes, memoryOf(block), after, home);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  --block.issuing;
  block.writers.add(home);
  slot->readers.add(home);
  if (failure) {
    slot->become(SlotState::Dirty); // the only place where these bytes are
  } else {
    slot->become(SlotState::Clean);
    block.hostVersion = std::max(block.hostVersion, slot->version);
    dev.queue.leave(slot);
  }
  Slots retired;
  letGo(slot, retired);
  issued_.notify_all();
  if (!retired.empty()) {
    lock.unlock();
    release(retired);
    lock.lock();
  }
  if (failure) std::rethrow_exception(failure);
}

// What the Link refuses stays Dirty: nothing is lost, and whoever needs the room, or the bytes, tries again.
bool Residency::tryWriteHome(Lock& lock, const std::shared_ptr<Slot>& slot) noexcept {
  try {
    writeHome(lock, slot);
    return true;
  } catch (...) {
    return false;
  }
}

bool Residency::isWithin(const Device& dev) {
  return dev.queue.stats.dirtyBytes == dev.queue.bufferedBytes() || dev.queue.budgetedBytes() <= dev.budget;
}

// Note [Room for results]
// A model that is fed with offload tensors has its activations in Dirty Slots, beside weights that fill what the budget has. Most results
// are gone soon, or are read by the backward pass: were each sent home to make room for the next, all of them would cross the link, and
// many come back. A weight that gives way has to be fetched again, once in a pass, and makes room for all the results of the pass. So
// results go first up to half of the budget, as PyTorch's own activations do with an automatic one, and the most that two passes have had
// is left to them when weights are chosen. What nobody has used since the pass before began (outputs that a program collects)
// is no such result: it goes home before a weight does. Gradients of parameters take what weights leave.
std::size_t Residency::roomForResults(const Device& dev) {
  return std::min(dev.room, dev.budget / 2);
}

// Whether so many bytes more may stay.
bool Residency::fits(const Device& dev, std::size_t bytes) {
  const std::size_t results = dev.queue.resultBytes();
  const std::size_t left = std::max(roomForResults(dev), results) - results;
  return dev.queue.budgetedBytes() + left + bytes <= dev.budget;
}

// When a pass ends. What is somewhat less than it was leaves the plan as it is.
void Residency::keepRoom(Device& dev) {
  const std::size_t held = std::max(dev.results, dev.resultsBefore);
  const std::uint64_t now = dev.schedule.forecast().count();
  // Where passes are shorter than what is looked through, not at the end of each: a loop that uses one weight has a pass a step.
  if ((now - dev.unusedAt) * kResultsForEachFetch >= dev.queue.dirtyCount()) {
    dev.unused = dev.queue.unusedBytes(dev.passBeforeBegan);
    dev.unusedAt = now;
  }
  const std::size_t most = held - std::min(held, dev.unused);
  dev.resultsBefore = std::exchange(dev.results, dev.queue.resultBytes());
  if (most > dev.room || most < dev.room / 2) dev.room = most + most / 8;
  dev.passBeforeBegan = std::exchange(dev.passBegan, now);
}

void Residency::makeRoomForResult(Lock& lock, Device& dev, Slots& retired) noexcept {
  dev.results = std::max(dev.results, dev.queue.resultBytes());
  while (!isWithin(dev)) {
    const auto unused = dev.queue.oldestDirty(false, dev.passBeforeBegan);
    if (unused && tryWriteHome(lock, unused)) continue;
    if (dev.queue.resultBytes() > dev.budget / 2 || !dev.queue.dropStaying(retired)) return;
  }
}

// Sends home what has been Dirty for longest, until the write buffer and the budget hold the rest. A gradient that finds no room has
// gone by itself: of all gradients the next micro-batch wants the newest one last, so those that are there should stay. One that is
// refused lets the others go first; where the next is, too, the Link refuses all.
void Residency::spill(Lock& lock, Device& dev, bool all) noexcept {
  for (int refused = 0; refused < 2 && (all || !isWithin(dev));) {
    const auto slot = dev.queue.oldestDirty(all);
    if (!slot) return;
    refused = tryWriteHome(lock, slot) ? 0 : refused + 1;
    if (refused > 0 && slot->state == SlotState::Dirty) dev.queue.keepLonger(*slot);
  }
}

std::shared_ptr<Slot> Residency::dirtyOf(const Block& block) const {
  if (block.hostVersion == block.version) return nullptr;
  for (const auto& slot : block.slots) {
    if (slot->version == block.version && slot->share == Share::Dirty) return slot;
  }
  return nullptr;
}

// Note [When a gradient goes home]
// The optimizer reads it on the host once all micro-batches have added to it. Sent home at each of them, most trips are for
// nothing; sent home when the optimizer asks, none overlaps with the backward pass. So it goes at the addition that was the last one
// before the host read this parameter's gradient last time: a weight that is used twice has one more. Other results, gradients of
// activations among them, stay until their room is wanted or the host asks: most never have to go.
bool Residency::isLastWrite(const Block& block) const {
  if (block.purpose != Purpose::Gradient || block.derivedFrom == nullptr) return false;
  const auto known = writesOfGradients_.find(block.derivedFrom);
  return block.adoptions >= (known == writesOfGradients_.end() ? 1 : known->second);
}

// What backward makes of a weight that has a gradient already.
bool Residency::isAddend(const Block& block) {
  return block.purpose == Purpose::Temporary && block.derivedFrom != nullptr;
}

void Residency::expectRead(Block& block) {
  if (block.purpose != Purpose::Gradient || block.adoptions == 0) return;
  writesOfGradients_[block.derivedFrom] = block.adoptions;
  block.adoptions = 0;
}

} // namespace offload
