// How fetches that are expected get their copies ahead of them.
//
// Note [Prefetch]
// After each fetch the Schedule is asked what comes next, as far as half of the ring has room for it: what is on the device already is
// kept there, and the first that is not gets a Slot and a copy. So the copy stream has work while the host waits for a result, and at
// the turning point between forward and backward nothing is copied that is still there. The other half is for what is in use, and
// for results on their way home: were these let go at once, the stream that computes would wait for each of their copies.
//
// A wrong guess costs the copies that were made, and no result. Each one doubles how long the order must have been the expected one
// before another guess is made, and each right one takes one off that: an order that can't be foretold is streamed.
#include "core/residency.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

constexpr int kMostLookedAt = 64; // for each fetch, so that it takes bounded time
constexpr int kMostCopies = 8;
constexpr std::uint64_t kMostPatience = 1024;

std::size_t shiftOf(const Block& block, Extent extent) {
  return (block.address() + extent.begin) % kAlignment;
}

const std::byte* hostOf(const Forecast::Expected& expected) {
  return static_cast<const std::byte*>(expected.block->data) + expected.extent.begin;
}

} // namespace

// Under the mutex, after a fetch has been recorded: from where on is to be looked.
void Residency::follow(Device& dev) {
  const Forecast& forecast = dev.schedule.forecast();
  const std::uint64_t now = forecast.count();
  dev.queue.advance(now);
  const bool lost = forecast.run() == 0;
  if (lost) dev.queue.expectNothing();
  if (dev.queue.wasInterrupted() || lost) dev.horizon = dev.unwritten = 0;
  const bool written = dev.unwritten <= now || !forecast.expected(dev.unwritten - now).writtenFirst;
  if (dev.unwritten != 0 && written) dev.horizon = std::exchange(dev.unwritten, 0) - 1;
  if (std::exchange(dev.wasted, dev.queue.stats.prefetchesWasted) != dev.queue.stats.prefetchesWasted) {
    dev.patience = std::min(2 * dev.patience, kMostPatience);
  }
  if (lost) lookAhead(dev); // what is still expected shall not make room for this fetch
}

// Under the mutex: the first of the expected fetches that needs a copy; those before it keep what they will find.
Forecast::Expected Residency::lookAhead(Device& dev) {
  if (!options_.prefetch || options_.evictAtUnpin || closed_) return {};
  const Forecast& forecast = dev.schedule.forecast();
  dev.horizon = std::max(dev.horizon, forecast.count());
  for (int looked = 0; looked < kMostLookedAt; ++looked, ++dev.horizon) {
    const auto next = forecast.expected(dev.horizon + 1 - forecast.count());
    if (next.block == nullptr) return {};
    if (next.writtenFirst) {
      if (dev.unwritten == 0) dev.unwritten = dev.horizon + 1;
    } else if (const auto slot = find(*next.block, next.extent, dev.index)) {
      const bool isNew = slot->share == Share::Passing && !slot->isAhead;
      if (isNew && !fitsAhead(dev, slot->buffer.bytes)) return {};
      dev.queue.expect(slot, dev.horizon + 1);
    } else {
      return next;
    }
  }
  return {};
}

bool Residency::fitsAhead(const Device& dev, std::size_t bytes) const {
  return dev.queue.aheadBytes() + bytes <= dev.ring / 2;
}

bool Residency::mayPrefetch(const Block& block) const {
  return block.issuing == 0 && block.leases == 0 && block.hostVersion == block.version;
}

// Under the mutex: holds a new Slot for the first of the expected fetches that needs one, without memory as yet; nothing if there is
// none, or no room.
Pin Residency::foresee(Device& dev, Slots& retired) {
  const auto next = lookAhead(dev);
  if (next.block == nullptr || dev.schedule.forecast().run() < dev.patience || !mayPrefetch(*next.block)) return {};
  const std::size_t bytes = next.extent.bytes() + shiftOf(*next.block, next.extent);
  const bool room = dev.queue.budgetedBytes() + bytes <= dev.budget;
  const bool stays = room && dev.schedule.keeps(*next.block, next.extent, room);
  if (!fitsAhead(dev, bytes) || (!stays && dev.queue.keptBytes(dev.ring) + bytes > dev.ring)) return {};
  auto slot = std::make_shared<Slot>();
  slot->extent = next.extent;
  slot->device = dev.index;
  slot->host = hostOf(next);
  slot->purpose = next.block->purpose;
  slot->buffer.bytes = bytes;
  dev.queue.makeRoom(stays ? 0 : bytes, dev.ring, retired);
  dev.queue.add(slot, stays ? Share::Staying : Share::Passing);
  return {*this, std::move(slot), nullptr, {}};
}

// Gives a Slot of foresee() memory and a copy; false where the Link refused, or something else has become of what was expected.
//
// The Block may go at any time but while it is `issuing`, and whoever destroys it may hold the GIL while he waits for that to end. So
// memory is allocated before, and the observer told, as either may want the GIL.
bool Residency::prefetch(Device& dev, const std::shared_ptr<Slot>& slot) noexcept {
  try {
    const Stream home = dev.transfer.deviceBound();
    slot->buffer.data = link_.allocate(slot->buffer.bytes, home);
    slot->buffer.home = home;
    const auto span = observe({Activity::Fetch, dev.index, slot->host, slot->extent.bytes(), slot->purpose});
    Lock lock(mutex_);
    const auto next = lookAhead(dev);
    // Another thread's fetch may have changed what is expected.
    if (next.block == nullptr || hostOf(next) != slot->host || next.extent != slot->extent) return false;
    Block& block = *next.block;
    if (!mayPrefetch(block)) return false;
    slot->data = static_cast<std::byte*>(slot->buffer.data) + shiftOf(block, slot->extent);
    slot->version = block.version;
    dev.queue.expect(slot, ++dev.horizon);
    std::vector<Token> after;
    block.writers.appendTo(after);
    ++block.issuing;
    lock.unlock();
    TokenSet reads;
    bool copied = false;
    try {
      copyIn(*slot, block, dev, after, reads);
      copied = true;
    } catch (...) {
      // The fetch itself will say what is wrong.
    }
    lock.lock();
    --block.issuing;
    block.readers.add(reads); // the copy may be on its way although something failed
    if (copied) {
      slot->become(SlotState::Clean);
      slot->block = &block;
      slot->unused = true;
      block.slots.push_back(slot);
      ++dev.queue.stats.prefetches;
    }
    lock.unlock();
    issued_.notify_all();
    return copied;
  } catch (...) {
    return false; // no memory: the fetch itself will make room, or say so
  }
}

void Residency::prefetchMore(Device& dev, Pin next) noexcept {
  for (int copies = 1; next && prefetch(dev, next.slot_) && copies < kMostCopies; ++copies) {
    next = Pin(); // what has its copy is found again
    Slots retired;
    {
      Lock lock(mutex_);
      next = foresee(dev, retired);
    }
    release(retired);
  }
}

} // namespace offload
