#include "core/captured_fetches.h"

#include "core/error.h"
#include "core/forked.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace offload {

CapturedFetches::CapturedFetches(
    Link& link, EventPool& events, std::shared_ptr<Staging> staging, std::shared_ptr<HeldCopies> copies, Stream origin,
    std::uint64_t id, Keep keep, CaptureOptions options)
    : link_(link),
      tokens_(events),
      staging_(std::move(staging)),
      heldCopies_(std::move(copies)),
      id_(id),
      keep_(std::move(keep)),
      options_(options),
      copies_(link.createStream(origin.device)) {
  try {
    begin_ = recordOn(origin);
  } catch (...) {
    destroy();
    throw;
  }
}

CapturedFetches::~CapturedFetches() {
  if (!isForked() && !staging_->closed()) destroy();
}

void CapturedFetches::destroy() noexcept {
  for (Event event : events_) link_.destroyEvent(event);
  link_.destroyStream(copies_);
}

Event CapturedFetches::recordOn(Stream stream) {
  const Event event = link_.createEvent(stream.device);
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
  }
  link_.record(event, stream);
  return event;
}

// Under the mutex.
void CapturedFetches::keep(Block& block) {
  if (kept_.contains(&block)) return;
  kept_[&block] = keep_(block);
  blocks_.push_back(&block);
}

const HeldCopy* CapturedFetches::hold(Block& block, Extent extent, const std::function<void*(std::size_t)>& allocate) {
  if (block.shared) return nullptr; // its version here doesn't tell of the other processes' writes
  auto copy = heldCopies_->get(block, extent, options_.heldBytes, allocate);
  if (!copy) return nullptr;
  const std::lock_guard lock(mutex_);
  keep(block);
  if (isHeld_.insert(copy.get()).second) held_.push_back(copy);
  return copy.get();
}

void CapturedFetches::refresh(const HeldCopy& copy, Stream stream) const {
  const auto* const host = static_cast<const std::byte*>(copy.block.data) + copy.extent.begin;
  enqueueCopy(copy.data, host, copy.extent.bytes(), *copy.buffer, stream);
}

// What has not been used in this graph is best, as nothing waits for it; then new memory, as far as the ring goes and the device has
// any. What is used again holds its copy up.
Staging::BufferPtr CapturedFetches::take(std::size_t bytes, const std::function<void*(std::size_t)>& allocate) {
  const auto mine = [this](Staging::BufferPtr buffer) {
    const std::lock_guard lock(mutex_);
    buffers_.push_back(buffer);
    return buffer;
  };
  if (auto buffer = staging_->take(bytes)) return mine(std::move(buffer));
  if (staging_->bytes() + bytes > options_.stagingBytes) {
    if (auto buffer = takeUsed(bytes)) return buffer;
  }
  void* data = nullptr;
  try {
    data = allocate(bytes);
  } catch (const OutOfMemory&) {
    if (auto buffer = takeUsed(bytes)) return buffer;
    throw;
  }
  return mine(staging_->add(data, bytes));
}

// The oldest that this graph has used and is done with; null if there is none of the size.
Staging::BufferPtr CapturedFetches::takeUsed(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto oldest = std::ranges::find_if(free_, [bytes](const auto& buffer) { return buffer->isFor(bytes); });
  if (oldest == free_.end()) return nullptr;
  Staging::BufferPtr buffer = std::move(*oldest);
  free_.erase(oldest);
  return buffer;
}

void CapturedFetches::copy(Block& block, const Slot& slot, Stream stream) {
  const auto* const buffer = static_cast<const Staging::Buffer*>(slot.buffer.owner.get());
  std::vector<Event> after{begin_};
  {
    const std::lock_guard lock(mutex_);
    keep(block);
    if (const auto uses = lastUses_.find(buffer); uses != lastUses_.end()) {
      after.insert(after.end(), uses->second.begin(), uses->second.end());
    }
  }
  for (Event event : after) link_.wait(copies_, event);
  {
    const std::lock_guard lock(mutex_);
    lastUses_.erase(buffer); // where a wait has failed, the next copy there still waits
  }
  try {
    enqueueCopy(slot.data, slot.host, slot.extent.bytes(), *buffer, copies_);
    link_.wait(stream, recordOn(copies_));
  } catch (...) {
    join(stream);
    throw;
  }
}

void CapturedFetches::enqueueCopy(
    void* to, const void* from, std::size_t bytes, const Staging::Buffer& buffer, Stream stream) const {
  if (options_.copyDelay.count() > 0) {
    link_.launchHost([delay = options_.copyDelay] { std::this_thread::sleep_for(delay); }, stream);
  }
  if (options_.poison) link_.fill(buffer.data, 0xFF, buffer.bytes, stream);
  link_.copyToDevice(to, from, bytes, stream);
}

// A capture that ends with a stream that was not joined is an error of its own, which would hide the first.
void CapturedFetches::join(Stream stream) noexcept {
  try {
    link_.wait(stream, recordOn(copies_));
  } catch (...) {
    // Then it is told in place of the first.
  }
}

void CapturedFetches::release(Slot& slot, const StreamSet& streams) noexcept {
  auto buffer = std::static_pointer_cast<Staging::Buffer>(std::exchange(slot.buffer, {}).owner);
  if (!buffer || staging_->closed()) return;
  std::vector<Event> uses;
  bool within = true;
  for (Stream stream : streams) {
    try {
      const std::uint64_t capture = link_.captureOf(stream);
      if (capture == id_) {
        if (!buffer->held) uses.push_back(recordOn(stream));
      } else {
        staging_->addUse(capture == 0 ? tokens_.record(stream) : tokens_.defer(stream));
        within = false;
      }
    } catch (...) {
      staging_->addUse(tokens_.defer(stream));
      within = false;
    }
  }
  if (!within || buffer->held) return;
  // What somebody held longer than the capture, another graph may have been given to read: a backward pass, say. It stays taken.
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  auto& all = lastUses_[buffer.get()];
  all.insert(all.end(), uses.begin(), uses.end());
  free_.push_back(std::move(buffer));
}

void CapturedFetches::end() {
  std::deque<Staging::BufferPtr> free;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    free.swap(free_);
    lastUses_.clear();
  }
  for (const auto& buffer : free) staging_->giveBack(*buffer);
}

} // namespace offload
