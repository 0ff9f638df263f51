// Fetches, leases of the host, and what is done to the cache as a whole.
#include "core/residency.h"

#include "core/error.h"
#include "core/forked.h"
#include "core/host_wait.h"
#include "core/shared_memory.h"

#include <algorithm>
#include <utility>

namespace offload {

void requireWithin(const Block& block, Extent extent) {
  if (extent.begin <= extent.end && extent.end <= block.bytes) return;
  throw Error(
      "offload: bytes " + std::to_string(extent.begin) + " to " + std::to_string(extent.end) + " were asked of a storage of " +
      std::to_string(block.bytes) + " bytes.");
}

HostMemory memoryOf(const Block& block) {
  const bool pinned = block.kind == BlockKind::Pinned || (block.shared && block.shared->pinned);
  return pinned ? HostMemory::Pinned : HostMemory::Pageable;
}

Residency::Residency(Link& link, ResidencyOptions options)
    : link_(link),
      events_(link),
      ringBytes_(options.ringBytes),
      budgetBytes_(options.budgetBytes),
      options_(options),
      ringIsSet_(options.ringIsSet),
      jobs_(options.hostJobs) {
  for (int index = 0; index < link.deviceCount(); ++index) {
    devices_.push_back(std::make_unique<Device>(
        link, events_, index, TransferOptions{options.copyDelay, options.chunkBytes, options.batchLeast}));
    devices_.back()->queue.setWriteBuffer(writeBuffer());
  }
}

Residency::~Residency() {
  jobs_.drain();
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
  const auto audited = audit("fetch", &block);
  if (const std::uint64_t capture = link_.captureOf(stream)) return fetchCaptured(block, extent, stream, capture);
  hostErrors_.raise();
  settle();
  if (extent.bytes() == 0) return {};
  requireWithin(block, extent);
  Device& dev = device(stream.device);
  look(dev);
  Slots retired;
  const ReleaseAtEnd atEnd{*this, retired};
  Ahead next;
  Lock lock(mutex_);
  ++dev.queue.stats.fetches;
  noticeShared(block, retired);
  if (dev.schedule.record(block, extent)) endPass(dev);
  follow(dev);
  const std::byte* const hostData = static_cast<const std::byte*>(block.data) + extent.begin;
  auto slot = awaitNewest(lock, block, extent, stream.device);
  if (slot) {
    ++dev.queue.stats.hits;
    if (std::exchange(slot->unused, false) && dev.patience > 1) --dev.patience;
    dev.queue.pin(slot);
    dev.largest = std::max(dev.largest, slot->buffer.bytes);
    foresee(dev, false, retired, next);
    const Token ready = slot->ready;
    std::byte* data = slot->data + (extent.begin - slot->extent.begin);
    lock.unlock();
    release(retired);
    Pin pinned(*this, std::move(slot), data, stream);
    observe({Activity::Hit, stream.device, hostData, extent.bytes(), block.purpose, block.derivedFrom});
    // Of a batch the first alone has to ask the driver.
    if (!ready.isBefore(stream) && !ready.done()) dev.stalls.orderBefore(ready, extent.bytes(), stream);
    prefetchMore(dev, std::move(next));
    return pinned;
  }

  bool tooLarge = false;
  Pin pinned = copyToDevice(lock, dev, block, extent, stream, retired, &tooLarge);
  dev.largest = std::max(dev.largest, pinned.slot_->buffer.bytes);
  foresee(dev, false, retired, next);
  const Token ready = pinned.slot_->ready; // which whoever else finds it may change
  lock.unlock();
  release(retired);
  dev.stalls.orderBefore(ready, extent.bytes(), stream);
  prefetchMore(dev, std::move(next));
  if (tooLarge) warnOfRing(pinned.slot_->buffer.bytes);
  return pinned;
}

// ---- host access

void Residency::prepareForWrite(Block& block) {
  if (block.file && block.file->inFile()) hostWait([&block] { block.file->prepare(Access::Write); });
}

HostLease Residency::lease(Block& block, Access access) {
  const auto audited = audit("lease", &block);
  hostErrors_.raise();
  if (access == Access::Write) {
    prepareForWrite(block);
  } else if (block.file) {
    block.file->prepare(access);
  }
  std::vector<Token> inTheWay;
  {
    Lock lock(mutex_);
    awaitIssued(lock, block);
    hostErrors_.raise(); // of a job that was waited for: it has not written what is to be read
    expectRead(block);
    while (auto dirty = dirtyOf(block)) {
      writeHome(lock, dirty);
      awaitIssued(lock, block);
    }
    block.writers.appendTo(inTheWay);
    if (access == Access::Write) block.readers.appendTo(inTheWay);
    ++block.leases;
  }
  HostLease lease(this, block, access);
  if (!std::all_of(inTheWay.begin(), inTheWay.end(), [](const Token& token) { return token.knownDone(); })) {
    const auto span = observe({Activity::Wait, -1, block.data, block.bytes, block.purpose, block.derivedFrom});
    for (const Token& token : inTheWay) token.wait();
  }
  {
    Lock lock(mutex_);
    block.writers.prune();
    block.readers.prune();
  }
  link_.hostAccess(block.data, block.bytes, access);
  return lease;
}

void Residency::endLease(Block& block, Access access) noexcept {
  if (isForked()) return;
  const auto audited = audit("endLease", &block);
  if (access == Access::Write) markWritten(block);
  {
    Lock lock(mutex_);
    --block.leases;
  }
  if (access == Access::Write) goOnAhead(block);
}

void Residency::markWritten(Block& block) {
  const auto audited = audit("markWritten", &block);
  Slots retired;
  {
    Lock lock(mutex_);
    if (block.file) block.file->markWritten();
    block.hostVersion = ++block.version;
    if (block.shared) block.shared->bump();
    retireStale(block, retired);
  }
  release(retired);
}

std::optional<std::uint64_t> Residency::awaitVersion(Block& block) {
  const auto audited = audit("awaitVersion", &block);
  Lock lock(mutex_);
  awaitIssued(lock, block);
  if (block.hostVersion != block.version) return {};
  return block.version;
}

std::uint64_t Residency::versionOf(const Block& block) const {
  const Lock lock(mutex_);
  return block.version;
}

std::vector<Token> Residency::forget(Block& block) noexcept {
  const auto audited = audit("forget");
  std::vector<Token> pending;
  Slots retired;
  {
    Lock lock(mutex_);
    // Another thread may be writing these bytes home, to make room: that takes calls of the driver, and nothing that we hold.
    issued_.wait(lock, [&block] { return block.issuing == 0; });
    for (auto& dev : devices_) dev->schedule.forget(block);
    const auto* const begin = static_cast<const std::byte*>(block.data);
    writesOfGradients_.erase(writesOfGradients_.lower_bound(begin), writesOfGradients_.lower_bound(begin + block.bytes));
    pending = block.writers.take();
    block.readers.appendTo(pending);
    for (const auto& slot : std::exchange(block.slots, {})) {
      slot->block = nullptr;
      SlotQueue& queue = device(slot->device).queue;
      queue.move(slot, Share::Passing);
      if (slot->pins == 0 && !closed_) queue.retire(slot, retired);
    }
  }
  release(retired);
  return pending;
}

// ---- under the mutex

void Residency::awaitIssued(Lock& lock, const Block& block) {
  // Who issues may need the GIL to go on, and the GIL is never taken back under the mutex.
  while (block.issuing > 0) {
    const bool forWork = block.claims > 0;
    const bool mine = forWork && jobs_.want(block);
    const std::uint64_t claims = claimsMade_;
    lock.unlock();
    auto waits = forWork ? observe({Activity::Wait, -1, block.data, block.bytes, block.purpose, block.derivedFrom}) : nullptr;
    if (mine) jobs_.runFor(block);
    hostWait([&] {
      Lock inner(mutex_);
      // Another job may have come, which has to be wanted as well.
      issued_.wait(inner, [&] { return block.issuing == 0 || claimsMade_ != claims; });
    });
    waits.reset(); // not under the mutex
    lock.lock();
  }
}

// A Slot that holds the newest bytes of the extent; none where the host does.
std::shared_ptr<Slot> Residency::awaitNewest(Lock& lock, Block& block, Extent extent, int index) {
  for (;;) {
    awaitIssued(lock, block);
    hostErrors_.raise(); // as in lease()
    if (auto slot = newestSlot(block, extent, index)) return slot;
    const auto elsewhere = dirtyOf(block);
    if (!elsewhere) return nullptr;
    writeHome(lock, elsewhere);
  }
}

std::size_t Residency::ring(std::size_t bytes) const {
  return std::max(ringBytes_, 2 * bytes);
}

std::size_t Residency::writeBuffer() const {
  if (budgetBytes_ == std::size_t{0} || options_.evictAtUnpin) return 0; // write-through, as somebody wants it
  return static_cast<std::size_t>(options_.writeBufferShare * static_cast<double>(ringBytes_));
}

void Residency::warnOfRing(std::size_t bytes) {
  if (!options_.warn) return;
  options_.warn(
      "offload: a fetch of " + std::to_string(bytes) +
      " bytes takes twice that from the device, which is more than the ring of " + std::to_string(ringBytes()) +
      " bytes that was set; raise it with torch_offload.set_ring_bytes() or TORCH_OFFLOAD_RING_BYTES.");
}

void Residency::refuseCapture(Stream stream, const char* what) {
  if (!isCaptured(stream)) return;
  throw Error(
      std::string("offload: can't ") + what +
      " while a CUDA graph is being captured: it would be done once, and by no replay. Do it outside of the capture, or with "
      "CUDA tensors.");
}

// ---- the whole

std::size_t Residency::emptyCache(int index) {
  const auto audited = audit("emptyCache");
  settle();
  Slots retired;
  std::size_t bytes = 0;
  {
    Lock lock(mutex_);
    Device& dev = device(index);
    spill(lock, dev, true);
    const std::size_t before = dev.queue.stats.slotBytes; // from here on nobody else changes it
    dev.queue.shrink(0, retired);
    dev.queue.makeRoom(0, 0, retired);
    bytes = before - dev.queue.stats.slotBytes;
  }
  release(retired);
  return bytes;
}

void Residency::drain(bool close) {
  jobs_.drain();
  const auto audited = audit("drain");
  settle();
  std::exception_ptr failure;
  for (auto& dev : devices_) {
    try {
      dev->transfer.drain();
      std::vector<Token> readers;
      {
        Lock lock(mutex_);
        readers = dev->readers.take();
      }
      for (const Token& token : readers) token.wait();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  {
    Lock lock(mutex_);
    closed_ = closed_ || close;
    for (auto& dev : devices_) {
      if (closed_ && dev->staging) dev->staging->close();
    }
  }
  if (failure) std::rethrow_exception(failure);
  hostErrors_.raise();
}

void Residency::setRingBytes(std::size_t bytes) {
  const auto audited = audit("setRingBytes");
  Slots retired;
  {
    Lock lock(mutex_);
    ringBytes_ = bytes;
    ringIsSet_ = true;
    for (auto& dev : devices_) {
      dev->queue.setWriteBuffer(writeBuffer());
      spill(lock, *dev);
      dev->queue.makeRoom(0, dev->ring = bytes, retired);
    }
  }
  release(retired);
}

std::size_t Residency::ringBytes() const {
  Lock lock(mutex_);
  return ringBytes_;
}

ResidencyStats Residency::stats(int index) const {
  Lock lock(mutex_);
  return device(index).queue.stats;
}

void Residency::resetPeaks(int index) {
  Lock lock(mutex_);
  auto& stats = device(index).queue.stats;
  stats.slotBytesPeak = stats.slotBytes;
}

void Residency::resetEver(int index) {
  Lock lock(mutex_);
  auto& stats = device(index).queue.stats;
  stats.slotBytesEver = stats.slotBytes;
}

void Residency::trimRings() {
  for (auto& dev : devices_) dev->transfer.trimRings();
}

StallStats Residency::stallStats(int index) {
  return device(index).stalls.stats();
}

TransferStats Residency::transferStats(int index) const {
  return device(index).transfer.stats();
}

} // namespace offload
