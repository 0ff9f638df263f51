// How Slots are let go of, and when their memory may be used again.
#include "core/error.h"
#include "core/forked.h"
#include "core/residency.h"

#include <algorithm>
#include <ranges>
#include <utility>

namespace offload {

void Residency::retireStale(Block& block, Slots& retired) {
  const auto stale = std::stable_partition(
      block.slots.begin(), block.slots.end(), [&block](const auto& slot) { return holdsNewest(*slot, block); });
  Slots all(stale, block.slots.end());
  // Those that go are not looked for among all the others.
  block.slots.erase(stale, block.slots.end());
  for (auto& slot : all) {
    SlotQueue& queue = device(slot->device).queue;
    queue.move(slot, Share::Passing); // also where it was Dirty: nobody wants those bytes home any more
    if (slot->pins > 0) {
      listSlot(slot);
    } else {
      queue.retire(std::move(slot), retired);
    }
  }
}

// Memory goes back in stream order: its home stream first waits for whatever still uses it. The last write needs no mention: the
// stream of every Pin has waited for it.
void Residency::orderBeforeReuse(const Slot& slot) {
  const Stream home = slot.buffer.home;
  bool asked = !slot.buffer.owner;
  for (const Token& token : slot.readers.all()) {
    if (token.isBefore(home)) continue;
    // Somebody else's memory goes back to his stream, which must not wait for ours while it is being captured.
    if (!std::exchange(asked, true) && link_.capturing(home)) throw Error("offload: a stream is being captured.");
    token.orderBefore(home);
  }
}

void Residency::release(Slots& retired) noexcept {
  if (retired.empty()) return;
  Slots refused;
  // The last first: whoever waits for its uses waits for most of the others'.
  for (auto& slot : std::views::reverse(retired)) {
    if (slot->buffer.data == nullptr) continue;
    try {
      orderBeforeReuse(*slot);
      if (options_.poison && !slot->buffer.owner) link_.fill(slot->buffer.data, 0xFF, slot->buffer.bytes, slot->buffer.home);
    } catch (...) {
      refused.push_back(std::move(slot));
      continue;
    }
    observe({Activity::Evict, slot->device, slot->host, slot->extent.bytes(), slot->purpose, slot->derivedFrom});
    const DeviceBuffer buffer = std::exchange(slot->buffer, {});
    if (!buffer.owner) link_.free(buffer.data, buffer.home);
  }
  retired.clear();
  if (refused.empty()) return;
  Lock lock(mutex_);
  for (auto& slot : refused) releaseLater(std::move(slot));
}

// Under the mutex.
void Residency::releaseLater(std::shared_ptr<Slot> slot) {
  unreleased_.push_back(std::move(slot));
  unsettled_ = true;
}

void Residency::unpin(const std::shared_ptr<Slot>& slot, const StreamSet& streams) noexcept {
  if (isForked()) return;
  const auto audited = audit("unpin");
  if (slot->captured) return slot->captured->release(*slot, streams);
  Slots retired;
  {
    Lock lock(mutex_);
    if (closed_) return;
    // Memory that stays is not wanted soon, if ever, and on its home stream it is reused in order anyway. An event that is recorded
    // when somebody asks then costs this call nothing, and tells no less; but of a stream that may be gone by then.
    const bool mayBeGone = std::ranges::any_of(streams, [](Stream stream) { return stream.id != 0; });
    if (!mayBeGone && (slot->share == Share::Staying || streams.isOnly(slot->buffer.home))) {
      for (Stream stream : streams) slot->readers.add(events_.defer(stream));
      letGo(slot, retired);
    } else {
      lock.unlock();
      recordUses(slot, streams, retired);
    }
  }
  release(retired);
}

void Residency::recordUses(const std::shared_ptr<Slot>& slot, const StreamSet& streams, Slots& retired) noexcept {
  std::vector<Token> used;
  bool refused = false;
  try {
    for (Stream stream : streams) refused = refused || link_.capturing(stream); // when no event may be recorded
    for (Stream stream : streams) {
      if (!refused) used.push_back(events_.record(stream));
    }
  } catch (...) {
    refused = true;
  }
  Lock lock(mutex_);
  if (refused) {
    deferred_.emplace_back(slot, streams);
    unsettled_ = true;
    return;
  }
  for (Token& token : used) slot->readers.add(std::move(token));
  if (slot->readers.all().size() > kManyTokens) {
    TokenSet* const readers = &slot->readers;
    lock.unlock();
    forgetDone({&readers, 1});
    lock.lock();
  }
  letGo(slot, retired);
}

// The sets must last meanwhile.
void Residency::forgetDone(std::span<TokenSet* const> sets) noexcept {
  if (sets.empty()) return;
  try {
    std::vector<Token> tokens;
    {
      const Lock lock(mutex_);
      for (const TokenSet* set : sets) set->appendTo(tokens);
    }
    for (const Token& token : tokens) token.done();
  } catch (...) {
    // The Link says nothing of it now; whoever waits for it is told.
  }
  const Lock lock(mutex_);
  for (TokenSet* const set : sets) set->prune();
}

// Under the mutex: one Pin less, and on the last one the account that the Schedule has chosen by now.
void Residency::letGo(const std::shared_ptr<Slot>& slot, Slots& retired) {
  Device& dev = device(slot->device);
  if (slot->share != Share::Dirty && slot->block != nullptr) {
    const bool room = slot->share == Share::Staying || fits(dev, slot->buffer.bytes);
    const bool stays = room && dev.schedule.keeps(*slot->block, slot->extent, true);
    dev.queue.move(slot, stays ? Share::Staying : Share::Passing);
  }
  dev.queue.unpin(slot, !options_.evictAtUnpin, retired);
}

void Residency::settle() noexcept {
  if (!unsettled_) return;
  decltype(deferred_) deferred;
  Slots unreleased;
  {
    Lock lock(mutex_);
    unsettled_ = false;
    deferred.swap(deferred_);
    unreleased.swap(unreleased_);
  }
  for (auto& [slot, streams] : deferred) unpin(slot, streams);
  release(unreleased);
}

} // namespace offload
