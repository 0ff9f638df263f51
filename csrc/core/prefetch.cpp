// How fetches that are expected get their copies ahead of them.
//
// Note [Prefetch]
// After each fetch the Schedule is asked what comes next, as far as half of the ring has room for it: what is on the device already is
// kept there, and what is not gets a Slot and a copy. So the copy stream has work while the host waits for a result, and at
// the turning point between forward and backward nothing is copied that is still there. The other half is for what is in use, and
// for results on their way home: were these let go at once, the stream that computes would wait for each of their copies. Where there
// are none, and the link has nothing to do, as after a wait for the step before, that half takes copies too: one at a time. Where it is
// wanted back, copies were made for nothing, and it is not lent again for a while, which doubles each time, and halves each time that a
// loan has been used up.
//
// Small and middle-sized extents of page-locked memory travel in batches: one call of the Link and one token for several. In a steady
// state a fetch makes room for one, so a batch waits until there is room for `batchBytes`, or for half of what may be ahead; the other
// half is what comes first. A fetch waits for no batch: what has no copy yet it copies itself.
//
// What the host will write first has to wait, and so has what comes after it in an order of forward and backward, which are the same
// Blocks. The end of the write that is waited for is the other occasion to ask what comes next.
//
// A wrong guess costs the copies that were made, and no result. It doubles how long the order must have been the expected one before
// another guess is made, every copy of it beyond the first adds one, and each right copy takes one off: an order that can't be foretold is
// streamed. Nor is anything kept for what such an order seems to want next: that would push out what is used often.
#include "core/residency.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

constexpr int kMostLookedAt = 64; // for each fetch, so that it takes bounded time
constexpr std::size_t kMostCopies = 8; // but what the last batch of them has beyond
constexpr std::uint64_t kMostPatience = 1024;
constexpr int kMostSteady = 64; // fetches that came as expected
constexpr int kOneAgainst = 4; // of these, for one that did not
constexpr int kSteady = 4;
constexpr std::uint64_t kLeastPause = 64;
constexpr std::uint64_t kMostPause = std::uint64_t{1} << 14;

std::size_t shiftOf(const Block& block, Extent extent) {
  return (block.address() + extent.begin) % kAlignment;
}

const std::byte* hostOf(const Forecast::Expected& expected) {
  return static_cast<const std::byte*>(expected.block->data) + expected.extent.begin;
}

bool isDone(const std::optional<Token>& copy) noexcept {
  try {
    return copy && copy->done();
  } catch (...) {
    return false; // whoever needs the copy will say what is wrong
  }
}

} // namespace

// Under the mutex, after a fetch has been recorded: from where on is to be looked.
void Residency::follow(Device& dev) {
  const Forecast& forecast = dev.schedule.forecast();
  const std::uint64_t now = forecast.count();
  dev.queue.advance(now);
  const bool noted = now != std::exchange(dev.followed, now); // what was made on the device may be no part of any order
  const bool anew = noted && !forecast.stands();
  if (noted) {
    dev.steady = forecast.foretold() ? std::min(dev.steady + 1, kMostSteady) : std::max(dev.steady - kOneAgainst, 0);
  }
  if (anew) dev.queue.expectNothing();
  if (dev.queue.wasInterrupted() || anew) dev.horizon = dev.unwritten = 0;
  const bool written = dev.unwritten <= now || !forecast.expected(dev.unwritten - now).writtenFirst;
  if (dev.unwritten != 0 && written) dev.horizon = std::exchange(dev.unwritten, 0) - 1;
  const std::uint64_t guesses = dev.queue.wrongGuesses() - std::exchange(dev.wrongGuesses, dev.queue.wrongGuesses());
  const std::uint64_t copies = dev.queue.wrongCopies() - std::exchange(dev.wrongCopies, dev.queue.wrongCopies());
  dev.patience = std::min((guesses > 0 ? 2 * dev.patience : dev.patience) + (copies - guesses), kMostPatience);
  if (anew) keepExpected(dev);
}

// Under the mutex: what is still expected shall not make room for this fetch, and what is late is the last to do so of the rest.
void Residency::keepExpected(Device& dev) {
  if (!looksAhead(dev)) return;
  lookAhead(dev, dev.ring / 2);
  for (const auto& late : dev.schedule.forecast().late()) {
    const auto slot = newestSlot(*late.block, late.extent, dev.index);
    if (slot && slot->share == Share::Passing) dev.queue.keepLonger(*slot);
  }
}

// Whether anything is kept or copied for what is expected.
bool Residency::looksAhead(const Device& dev) const {
  return options_.prefetch && !options_.evictAtUnpin && !closed_ && dev.steady >= kSteady;
}

// Under the mutex: the first of the expected fetches that needs a copy; those before it keep what they will find, `most` bytes of it.
Forecast::Expected Residency::lookAhead(Device& dev, std::size_t most) {
  if (!looksAhead(dev)) return {};
  const Forecast& forecast = dev.schedule.forecast();
  dev.horizon = std::max(dev.horizon, forecast.count());
  for (int looked = 0; looked < kMostLookedAt; ++looked, ++dev.horizon) {
    const auto next = forecast.expected(dev.horizon + 1 - forecast.count());
    if (next.block == nullptr) return {};
    if (next.writtenFirst) {
      if (dev.unwritten == 0) dev.unwritten = dev.horizon + 1;
    } else if (const auto slot = newestSlot(*next.block, next.extent, dev.index)) {
      const bool isNew = slot->share == Share::Passing && !slot->isAhead;
      if (isNew && dev.queue.aheadBytes() + slot->buffer.bytes > most) return {};
      dev.queue.expect(slot, dev.horizon + 1);
    } else {
      return next;
    }
  }
  return {};
}

bool Residency::mayPrefetch(const Block& block) const {
  return block.issuing == 0 && block.leases == 0 && block.hostVersion == block.version;
}

bool Residency::goesInBatch(const Forecast::Expected& expected) const {
  return expected.extent.bytes() <= options_.batchMost && memoryOf(*expected.block) == HostMemory::Pinned;
}

// Under the mutex: a fetch or a result has taken back what an idle link was lent.
void Residency::pauseLending(Device& dev) {
  if (!std::exchange(dev.lent, false)) return;
  dev.pause = std::clamp(2 * dev.pause, kLeastPause, kMostPause);
  dev.lendsFrom = dev.schedule.forecast().count() + dev.pause;
}

// Under the mutex: holds new Slots, without memory as yet, for the expected fetches that need one: a batch, or one that goes alone;
// none where nothing is to be copied, or there is no room, or not enough for a batch to begin. An `idle` link may use the whole ring.
void Residency::lookForCopies(Device& dev, bool idle, Slots& retired, Ahead& ahead) {
  auto& batch = ahead.batch;
  std::size_t bytes = 0;
  const std::size_t most = idle ? dev.ring : dev.ring / 2;
  const std::size_t mostAtOnce = std::min(options_.batchBytes, dev.ring / 4);
  if (!idle && dev.queue.aheadBytes() <= dev.ring / 2 && std::exchange(dev.lent, false)) dev.pause /= 2;
  for (int looked = 0; looked < kMostLookedAt; ++looked) {
    const auto next = lookAhead(dev, most);
    if (next.block == nullptr || dev.schedule.forecast().run() < dev.patience || !mayPrefetch(*next.block)) break;
    const auto again = std::find_if(batch.begin(), batch.end(), [&next](const Pin& pin) {
      return pin.slot_->host == hostOf(next) && pin.slot_->extent == next.extent;
    });
    if (again != batch.end()) {
      dev.queue.expect(again->slot_, ++dev.horizon);
      continue;
    }
    const bool alone = !goesInBatch(next);
    const std::size_t own = next.extent.bytes() + shiftOf(*next.block, next.extent);
    if (!batch.empty() && (alone || bytes + own > mostAtOnce)) break;
    const bool room = fits(dev, own);
    const bool stays = room && dev.schedule.keeps(*next.block, next.extent, room);
    if (!stays && dev.queue.keptBytes(dev.ring) + own > dev.ring) break;
    const std::size_t wanted = batch.empty() && !alone ? std::max(own, mostAtOnce) : bytes + own;
    if (dev.queue.aheadBytes() + wanted > most) {
      const bool results = dev.queue.leavingBytes() + dev.queue.bufferedBytes() > 0;
      const bool lends = !results && dev.schedule.forecast().count() >= dev.lendsFrom;
      if (batch.empty() && !idle && lends) ahead.lastCopy = dev.lastCopy;
      break;
    }
    if (batch.empty()) batch.reserve(alone ? 1 : kMostLookedAt);
    auto slot = std::make_shared<Slot>();
    slot->extent = next.extent;
    slot->device = dev.index;
    slot->host = hostOf(next);
    slot->purpose = next.block->purpose;
    slot->derivedFrom = next.block->derivedFrom;
    slot->buffer.bytes = own;
    dev.queue.makeRoom(stays ? 0 : own, dev.ring, retired);
    dev.queue.add(slot, stays ? Share::Staying : Share::Passing);
    if (!stays) dev.schedule.missed(next.extent.bytes());
    dev.queue.expect(slot, ++dev.horizon);
    dev.lent = dev.lent || idle;
    batch.push_back({*this, std::move(slot), nullptr, {}});
    bytes += own;
    if (alone) break;
  }
}

// `ahead` outlives the lock, as its Pins take it when they go.
void Residency::foresee(Device& dev, bool idle, Slots& retired, Ahead& ahead) noexcept {
  try {
    lookForCopies(dev, idle, retired, ahead);
  } catch (...) {
    // No memory: what has not been foreseen is copied by its fetch.
  }
}

// Under the mutex: the Block that a Slot of foresee() is for; null where another thread's fetch, or write, has changed what is expected,
// or the Block is gone.
Block* Residency::stillExpected(const Device& dev, const Slot& slot) const {
  if (closed_ || !dev.queue.isExpected(slot)) return nullptr;
  const Forecast& forecast = dev.schedule.forecast();
  const auto next = forecast.expected(slot.expected - forecast.count());
  if (next.block == nullptr || next.writtenFirst || hostOf(next) != slot.host || next.extent != slot.extent) return nullptr;
  return mayPrefetch(*next.block) ? next.block : nullptr;
}

// Gives Slots of foresee() memory and their copies; false where some did without, as the Link refused, or something else has become of
// what was expected.
//
// A Block may go at any time but while it is `issuing`, and whoever destroys it may hold the GIL while he waits for that to end. So
// memory is allocated before, which may want the GIL.
bool Residency::prefetch(Device& dev, const std::vector<Pin>& batch) noexcept {
  try {
    const Stream home = dev.transfer.deviceBound();
    std::vector<std::shared_ptr<Slot>> slots;
    std::vector<Copying> copying;
    copying.reserve(batch.size());
    for (const Pin& pin : batch) {
      Slot& slot = *pin.slot_;
      try {
        slot.buffer.data = link_.allocate(slot.buffer.bytes, home);
      } catch (...) {
        break; // no memory: the fetch itself will make room, or say so
      }
      slot.buffer.home = home;
      moveElsewhere(slot);
      slots.push_back(pin.slot_);
    }
    std::unique_ptr<Observer::Span> span; // one after the other; all copies are enqueued within the last
    for (const auto& slot : slots) {
      span.reset();
      span = observe({Activity::Prefetch, dev.index, slot->host, slot->extent.bytes(), slot->purpose, slot->derivedFrom});
    }
    TokenSet after;
    Lock lock(mutex_);
    for (const auto& slot : slots) {
      Block* const block = stillExpected(dev, *slot);
      if (block == nullptr) continue;
      after.add(block->writers);
      copying.push_back({slot, block});
    }
    if (copying.empty()) return false;
    for (const auto& [slot, block] : copying) {
      slot->data = static_cast<std::byte*>(slot->buffer.data) + shiftOf(*block, slot->extent);
      slot->version = block->version;
      ++block->issuing;
    }
    lock.unlock();
    TokenSet reads;
    bool copied = false;
    try {
      copyAllIn(copying, dev, after.all(), reads);
      copied = true;
    } catch (...) {
      // The fetch itself will say what is wrong.
    }
    lock.lock();
    for (const auto& [slot, block] : copying) {
      --block->issuing;
      block->readers.add(reads); // the copies may be on their way although something failed
      if (!copied) continue;
      slot->become(SlotState::Clean);
      slot->block = block;
      slot->unused = true;
      listSlot(slot);
      dev.lastCopy = slot->ready;
      ++dev.queue.stats.prefetches;
    }
    lock.unlock();
    issued_.notify_all();
    return copied && copying.size() == batch.size();
  } catch (...) {
    return false;
  }
}

void Residency::prefetchMore(Device& dev, Ahead next) noexcept {
  for (std::size_t copies = 0; copies < kMostCopies;) {
    const bool idle = next.batch.empty();
    if (idle && !isDone(next.lastCopy)) return;
    if (!idle && !prefetch(dev, next.batch)) return;
    copies += next.batch.size();
    next = {}; // what has its copy is found again
    Slots retired;
    {
      Lock lock(mutex_);
      foresee(dev, idle, retired, next);
    }
    release(retired);
  }
}

// The host has written to a Block, and whatever comes first has waited for that: so a step of an optimizer is followed by copies.
void Residency::goOnAhead(const Block& written) noexcept {
  for (auto& dev : devices_) {
    Ahead next;
    Slots retired;
    try {
      Lock lock(mutex_);
      const Forecast& forecast = dev->schedule.forecast();
      if (dev->unwritten <= forecast.count()) continue;
      const auto first = forecast.expected(dev->unwritten - forecast.count());
      if (first.block != &written || first.writtenFirst) continue;
      dev->horizon = std::exchange(dev->unwritten, 0) - 1;
      foresee(*dev, false, retired, next);
    } catch (...) {
      // The fetch itself will copy.
    }
    release(retired);
    prefetchMore(*dev, std::move(next));
  }
}

Pin Residency::fetchAhead(Block& block, Extent extent, Stream stream) {
  const auto audited = audit("fetchAhead", &block);
  if (link_.capturing(stream)) return {}; // the copies of a graph are ahead by themselves
  settle();
  if (extent.bytes() == 0) return {};
  requireWithin(block, extent);
  return pinNewest(device(stream.device), block, extent, {});
}

// Of these bytes on the device, which nothing has waited for; the Schedule isn't told, and the cache isn't emptied for them.
Pin Residency::pinNewest(Device& dev, Block& block, Extent extent, const StreamSet& streams) {
  Lock lock(mutex_);
  if (auto slot = awaitNewest(lock, block, extent, dev.index)) {
    slot->unused = false;
    dev.queue.pin(slot);
    lock.unlock();
    std::byte* const data = slot->data + (extent.begin - slot->extent.begin);
    return {*this, std::move(slot), data, streams};
  }
  ++dev.queue.stats.prefetches;
  Slots retired;
  return copyToDevice(lock, dev, block, extent, streams, retired, nullptr);
}

} // namespace offload
