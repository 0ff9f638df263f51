#include "core/residency.h"

#include "core/error.h"
#include "core/host_wait.h"

#include <algorithm>
#include <cassert>

namespace offload {

Residency::Residency(Link& link, ResidencyOptions options)
    : link_(link), events_(link), ringBytes_(options.ringBytes), options_(options) {
  for (int index = 0; index < link.deviceCount(); ++index) {
    devices_.push_back(std::make_unique<Device>(link, events_, index, options.copyDelay));
  }
}

Residency::~Residency() {
  for (int index = 0; index < static_cast<int>(devices_.size()); ++index) emptyCache(index);
}

Residency::Device& Residency::device(int index) {
  return *devices_.at(static_cast<std::size_t>(index));
}

const Residency::Device& Residency::device(int index) const {
  return *devices_.at(static_cast<std::size_t>(index));
}

// ---- fetch

Pin Residency::fetch(Block& block, Extent extent, Stream stream) {
  refuseCapture(stream, "fetch");
  settleDeferred();
  if (extent.bytes() == 0) return {};
  if (extent.end > block.bytes) {
    throw Error("offload: bytes " + std::to_string(extent.begin) + " to " + std::to_string(extent.end) +
                " were asked of a storage of " + std::to_string(block.bytes) + " bytes.");
  }
  Device& dev = device(stream.device);
  Lock lock(mutex_);
  ++dev.stats.fetches;
  awaitIssued(lock, block);
  if (auto slot = find(block, extent, stream.device)) {
    ++dev.stats.hits;
    pin(*slot);
    const Token ready = slot->ready;
    std::byte* data = slot->data + (extent.begin - slot->extent.begin);
    lock.unlock();
    Pin pinned(*this, std::move(slot), data, stream);
    ready.orderBefore(stream);
    return pinned;
  }

  auto slot = std::make_shared<Slot>();
  slot->block = &block;
  slot->extent = extent;
  slot->device = stream.device;
  slot->version = block.version;
  slot->pins = 1;
  const std::size_t shift = (reinterpret_cast<std::uintptr_t>(block.data) + extent.begin) % kAlignment;
  const std::size_t bytes = extent.bytes() + shift;
  Slots retired;
  makeRoom(dev, bytes, retired);
  dev.stats.slotBytes += bytes;
  dev.stats.pinnedBytes += bytes;
  dev.stats.slotBytesPeak = std::max(dev.stats.slotBytesPeak, dev.stats.slotBytes);
  slot->buffer.bytes = bytes;
  std::vector<Token> after;
  block.writers.appendTo(after);
  ++block.issuing;
  lock.unlock();

  release(retired);
  std::exception_ptr failure;
  try {
    slot->buffer = allocate(dev, bytes);
    slot->data = static_cast<std::byte*>(slot->buffer.data) + shift;
    copyIn(*slot, block, dev, after, stream);
  } catch (...) {
    failure = std::current_exception();
  }

  lock.lock();
  --block.issuing;
  if (failure) {
    dev.stats.slotBytes -= bytes;
    dev.stats.pinnedBytes -= bytes;
    transition(*slot, SlotState::Gone);
    if (slot->buffer.data != nullptr) retired.push_back(slot);
  } else {
    block.readers.add(slot->ready);
    transition(*slot, SlotState::Clean);
    block.slots.push_back(slot);
  }
  lock.unlock();
  issued_.notify_all();
  if (failure) {
    release(retired);
    std::rethrow_exception(failure);
  }
  return Pin(*this, slot, slot->data, stream);
}

void Residency::copyIn(Slot& slot, const Block& block, Device& dev, const std::vector<Token>& after, Stream stream) {
  if (options_.poison) link_.fill(slot.buffer.data, 0xFF, slot.buffer.bytes, slot.buffer.home);
  const auto* host = static_cast<const std::byte*>(block.data) + slot.extent.begin;
  slot.ready = dev.transfer.toDevice(slot.data, host, slot.extent.bytes(), after);
  slot.ready.orderBefore(stream);
}

std::shared_ptr<Slot> Residency::find(const Block& block, Extent extent, int index) const {
  for (const auto& slot : block.slots) {
    if (slot->device == index && slot->version == block.version && slot->extent.contains(extent)) return slot;
  }
  return nullptr;
}

DeviceBuffer Residency::allocate(Device& dev, std::size_t bytes) {
  const Stream home = dev.transfer.deviceBound();
  try {
    return {link_.allocate(bytes, home), bytes, home, nullptr};
  } catch (const OutOfMemory&) {
    if (emptyCache(home.device) == 0) throw;
  }
  return {link_.allocate(bytes, home), bytes, home, nullptr};
}

// ---- results that come home

void Residency::adopt(Block& block, DeviceBuffer buffer, Stream producer) {
  refuseCapture(producer, "keep a result");
  settleDeferred();
  auto slot = std::make_shared<Slot>();
  slot->block = &block;
  slot->extent = {0, block.bytes};
  slot->device = producer.device;
  slot->state = SlotState::Dirty;
  slot->buffer = std::move(buffer);
  slot->data = static_cast<std::byte*>(slot->buffer.data);
  slot->ready = events_.record(producer);
  slot->pins = 1; // ours, until the bytes are on their way home
  Device& dev = device(producer.device);
  Slots retired;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    makeRoom(dev, slot->buffer.bytes, retired);
    dev.stats.slotBytes += slot->buffer.bytes;
    dev.stats.pinnedBytes += slot->buffer.bytes;
    dev.stats.slotBytesPeak = std::max(dev.stats.slotBytesPeak, dev.stats.slotBytes);
    slot->version = ++block.version;
    retireStale(block, retired);
    block.slots.push_back(slot);
  }
  release(retired);
  Pin guard(*this, slot, slot->data, producer);
  writeBack(block, slot);
}

void Residency::writeBack(Block& block, const std::shared_ptr<Slot>& slot) {
  Device& dev = device(slot->device);
  std::vector<Token> after;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    block.writers.appendTo(after);
    block.readers.appendTo(after);
    after.push_back(slot->ready);
    transition(*slot, SlotState::WritingBack);
    ++block.issuing;
  }
  Token home;
  std::exception_ptr failure;
  try {
    home = dev.transfer.toHost(static_cast<std::byte*>(block.data) + slot->extent.begin, slot->data, slot->extent.bytes(), after);
  } catch (...) {
    failure = std::current_exception();
  }
  bool leased = false;
  {
    Lock lock(mutex_);
    --block.issuing;
    if (!failure) {
      block.writers.add(home);
      block.hostVersion = slot->version;
      slot->readers.add(home);
      transition(*slot, SlotState::Clean);
    }
    leased = block.leases > 0;
  }
  issued_.notify_all();
  if (failure) std::rethrow_exception(failure);
  if (leased) home.wait();
}

void Residency::store(Block& block, Extent extent, const void* source, Stream producer) {
  refuseCapture(producer, "copy into an offload tensor");
  settleDeferred();
  if (extent.bytes() == 0) return;
  Device& dev = device(producer.device);
  std::vector<Token> after{events_.record(producer)};
  Slots retired;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    block.writers.appendTo(after);
    block.readers.appendTo(after);
    ++block.issuing;
  }
  Token home;
  std::exception_ptr failure;
  try {
    home = dev.transfer.toHost(static_cast<std::byte*>(block.data) + extent.begin, source, extent.bytes(), after);
    home.orderBefore(producer);
  } catch (...) {
    failure = std::current_exception();
  }
  bool leased = false;
  {
    Lock lock(mutex_);
    --block.issuing;
    block.writers.add(home);
    block.hostVersion = ++block.version;
    retireStale(block, retired);
    leased = block.leases > 0;
  }
  issued_.notify_all();
  release(retired);
  if (failure) std::rethrow_exception(failure);
  if (leased) home.wait();
}

// ---- host access

HostLease Residency::lease(Block& block, Access access) {
  std::vector<Token> inTheWay;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    ++block.leases;
    block.writers.appendTo(inTheWay);
    if (access == Access::Write) block.readers.appendTo(inTheWay);
  }
  HostLease lease(*this, block, access);
  for (const Token& token : inTheWay) token.wait();
  {
    Lock lock(mutex_);
    block.writers.prune();
    block.readers.prune();
  }
  link_.hostAccess(block.data, block.bytes, access);
  return lease;
}

void Residency::endLease(Block& block, Access access) noexcept {
  if (access == Access::Write) markWritten(block);
  Lock lock(mutex_);
  --block.leases;
}

void Residency::markWritten(Block& block) {
  Slots retired;
  {
    Lock lock(mutex_);
    block.hostVersion = ++block.version;
    retireStale(block, retired);
  }
  release(retired);
}

std::vector<Token> Residency::forget(Block& block) noexcept {
  std::vector<Token> pending;
  Slots retired;
  {
    Lock lock(mutex_);
    if (closed_) return pending;
    pending = block.writers.take();
    block.readers.appendTo(pending);
    Slots slots = std::move(block.slots);
    block.slots.clear();
    for (const auto& slot : slots) {
      slot->block = nullptr;
      if (slot->pins == 0) retire(slot, retired);
    }
  }
  release(retired);
  return pending;
}

// ---- Slots; all of these but release() run under the mutex

void Residency::awaitIssued(Lock& lock, const Block& block) {
  // Who issues may need the GIL to go on, and the GIL is never taken back under the mutex.
  while (block.issuing > 0) {
    lock.unlock();
    hostWait([&] {
      Lock inner(mutex_);
      issued_.wait(inner, [&] { return block.issuing == 0; });
    });
    lock.lock();
  }
}

void Residency::transition(Slot& slot, SlotState to) {
  assert(mayBecome(slot.state, to));
  slot.state = to;
}

void Residency::pin(Slot& slot) {
  if (slot.pins++ > 0) return;
  Device& dev = device(slot.device);
  dev.stats.pinnedBytes += slot.buffer.bytes;
  if (slot.isIdle) {
    dev.idle.erase(slot.idle);
    slot.isIdle = false;
  }
}

void Residency::setIdle(const std::shared_ptr<Slot>& slot, Slots& retired) {
  Device& dev = device(slot->device);
  dev.stats.pinnedBytes -= slot->buffer.bytes;
  const bool stale = slot->block == nullptr || slot->version != slot->block->version || slot->state != SlotState::Clean;
  if (stale || options_.evictAtUnpin) {
    retire(slot, retired);
    return;
  }
  slot->idle = dev.idle.insert(dev.idle.end(), slot);
  slot->isIdle = true;
}

void Residency::retire(const std::shared_ptr<Slot>& slot, Slots& retired) {
  Device& dev = device(slot->device);
  auto keep = slot; // the lists below may hold the last other references
  if (slot->isIdle) {
    slot->isIdle = false;
    dev.idle.erase(slot->idle);
  }
  if (keep->block != nullptr) std::erase(keep->block->slots, keep);
  transition(*keep, SlotState::Gone);
  dev.stats.slotBytes -= keep->buffer.bytes;
  ++dev.stats.evictions;
  retired.push_back(std::move(keep));
}

void Residency::makeRoom(Device& dev, std::size_t bytes, Slots& retired) {
  const std::size_t budget = std::max(ringBytes_, 2 * bytes);
  while (dev.stats.slotBytes + bytes > budget && !dev.idle.empty()) retire(std::shared_ptr<Slot>(dev.idle.front()), retired);
}

void Residency::retireStale(Block& block, Slots& retired) {
  Slots stale;
  for (const auto& slot : block.slots) {
    if (slot->version != block.version && slot->pins == 0) stale.push_back(slot);
  }
  for (const auto& slot : stale) retire(slot, retired);
}

// Memory goes back in stream order: its home stream first waits for whatever still uses it.
void Residency::release(Slots& retired) noexcept {
  for (auto& slot : retired) {
    DeviceBuffer buffer = std::exchange(slot->buffer, {});
    if (buffer.data == nullptr) continue;
    try {
      slot->ready.orderBefore(buffer.home);
      for (const Token& token : slot->readers.all()) token.orderBefore(buffer.home);
      if (options_.poison && buffer.owner == nullptr) link_.fill(buffer.data, 0xFF, buffer.bytes, buffer.home);
    } catch (...) {
      // The device is lost: nothing may reuse the memory any more.
      if (buffer.owner) new std::shared_ptr<void>(std::move(buffer.owner));
      continue;
    }
    if (buffer.owner == nullptr) link_.free(buffer.data, buffer.home);
  }
  retired.clear();
}

// ---- Pins

void Residency::unpin(const std::shared_ptr<Slot>& slot, const std::vector<Stream>& streams) noexcept {
  std::vector<Token> used;
  Slots retired;
  try {
    {
      Lock lock(mutex_);
      if (closed_) return;
    }
    for (Stream stream : streams) {
      if (link_.capturing(stream)) {
        Lock lock(mutex_);
        deferred_.emplace_back(slot, streams);
        return;
      }
    }
    for (Stream stream : streams) used.push_back(events_.record(stream));
  } catch (...) {
    return; // the device is lost; the Slot stays pinned for good
  }
  {
    Lock lock(mutex_);
    for (Token& token : used) slot->readers.add(std::move(token));
    if (--slot->pins == 0) setIdle(slot, retired);
  }
  release(retired);
}

void Residency::settleDeferred() noexcept {
  decltype(deferred_) deferred;
  {
    Lock lock(mutex_);
    if (deferred_.empty()) return;
    deferred.swap(deferred_);
  }
  for (auto& [slot, streams] : deferred) unpin(slot, streams);
}

void Residency::refuseCapture(Stream stream, const char* what) {
  if (!link_.capturing(stream)) return;
  throw Error(std::string("offload: can't ") + what +
              " while a CUDA graph is being captured: a replay would read the address of a cached copy that may be gone. "
              "Capture without offload tensors, or move the ones that the graph uses to CUDA first.");
}

// ---- the whole

std::size_t Residency::emptyCache(int index) {
  Slots retired;
  std::size_t bytes = 0;
  {
    Lock lock(mutex_);
    Device& dev = device(index);
    const std::size_t before = dev.stats.slotBytes;
    while (!dev.idle.empty()) retire(std::shared_ptr<Slot>(dev.idle.front()), retired);
    bytes = before - dev.stats.slotBytes;
  }
  release(retired);
  return bytes;
}

void Residency::drain(bool close) {
  settleDeferred();
  for (auto& dev : devices_) {
    events_.record(dev->transfer.deviceBound()).wait();
    events_.record(dev->transfer.hostBound()).wait();
  }
  Lock lock(mutex_);
  closed_ = closed_ || close;
}

void Residency::setRingBytes(std::size_t bytes) {
  Slots retired;
  {
    Lock lock(mutex_);
    ringBytes_ = bytes;
    for (auto& dev : devices_) makeRoom(*dev, 0, retired);
  }
  release(retired);
}

std::size_t Residency::ringBytes() const {
  Lock lock(mutex_);
  return ringBytes_;
}

ResidencyStats Residency::stats(int index) const {
  Lock lock(mutex_);
  return device(index).stats;
}

void Residency::resetPeaks(int index) {
  Lock lock(mutex_);
  auto& stats = device(index).stats;
  stats.slotBytesPeak = stats.slotBytes;
}

TransferStats Residency::transferStats(int index) const {
  return device(index).transfer.stats();
}

void Residency::validate(const Block& block) const {
  auto require = [](bool holds, const char* what) {
    if (!holds) throw Error(std::string("offload: the cache is inconsistent: ") + what);
  };
  Lock lock(mutex_);
  require(block.hostVersion <= block.version, "host bytes are newer than the newest");
  for (const auto& slot : block.slots) {
    require(slot->block == &block, "a Slot belongs to another Block");
    require(slot->extent.end <= block.bytes, "an extent reaches past its Block");
    require(slot->version <= block.version, "a Slot is newer than its Block");
    require(slot->state != SlotState::Gone && slot->buffer.data != nullptr, "a listed Slot has no memory");
    require((slot->pins == 0) == slot->isIdle, "an unpinned Slot is not in the queue");
    require(slot->pins > 0 || slot->version == block.version, "a stale Slot is kept");
  }
  for (const auto& dev : devices_) {
    std::size_t idleBytes = 0;
    for (const auto& slot : dev->idle) {
      require(slot->isIdle && slot->pins == 0, "a Slot in the queue is pinned");
      idleBytes += slot->buffer.bytes;
    }
    require(idleBytes + dev->stats.pinnedBytes == dev->stats.slotBytes, "bytes are miscounted");
  }
}

} // namespace offload
