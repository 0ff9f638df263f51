#include "core/slot_queue.h"

#include "core/error.h"

#include <algorithm>

namespace offload {

SlotQueue::List& SlotQueue::listOf(const Slot& slot) {
  if (slot.share == Share::Dirty) return dirty_;
  if (slot.share == Share::Staying) return staying_;
  return slot.isAhead ? ahead_ : passing_;
}

std::size_t* SlotQueue::accountOf(const Slot& slot) {
  if (slot.share == Share::Passing) return nullptr;
  return slot.share == Share::Dirty ? &stats.dirtyBytes : &stats.stayingBytes;
}

void SlotQueue::enlist(const std::shared_ptr<Slot>& slot) {
  slot->isAhead = slot->share == Share::Passing && isExpected(*slot);
  if (slot->share == Share::Passing) (slot->isAhead ? aheadBytes_ : idleBytes_) += slot->buffer.bytes;
  List& list = listOf(*slot);
  slot->place = list.insert(list.end(), slot);
  slot->isListed = true;
}

void SlotQueue::delist(Slot& slot) {
  if (!slot.isListed) return;
  slot.isListed = false;
  listOf(slot).erase(slot.place);
  if (slot.share == Share::Passing) (slot.isAhead ? aheadBytes_ : idleBytes_) -= slot.buffer.bytes;
}

void SlotQueue::charge(Slot& slot, Share share) {
  slot.share = share;
  if (auto* account = accountOf(slot)) *account += slot.buffer.bytes;
}

void SlotQueue::discharge(Slot& slot) {
  if (auto* account = accountOf(slot)) *account -= slot.buffer.bytes;
}

void SlotQueue::add(const std::shared_ptr<Slot>& slot, Share share) {
  slot->pins = 1;
  stats.slotBytes += slot->buffer.bytes;
  stats.pinnedBytes += slot->buffer.bytes;
  stats.slotBytesPeak = std::max(stats.slotBytesPeak, stats.slotBytes);
  charge(*slot, share);
  if (share == Share::Dirty) enlist(slot);
}

void SlotQueue::pin(const std::shared_ptr<Slot>& slot) {
  if (slot->pins++ > 0) return;
  stats.pinnedBytes += slot->buffer.bytes;
  if (slot->share != Share::Dirty) delist(*slot);
}

void SlotQueue::unpin(const std::shared_ptr<Slot>& slot, bool keep, Slots& retired) {
  if (--slot->pins > 0) return;
  stats.pinnedBytes -= slot->buffer.bytes;
  const bool newest = slot->block != nullptr && holdsNewest(*slot, *slot->block);
  if (newest && slot->share == Share::Dirty) return;
  if (keep && newest && slot->state == SlotState::Clean) {
    enlist(slot);
  } else {
    retire(slot, retired);
  }
}

void SlotQueue::retire(std::shared_ptr<Slot> slot, Slots& retired) {
  delist(*slot);
  discharge(*slot);
  if (slot->block != nullptr) std::erase(slot->block->slots, slot);
  slot->become(SlotState::Gone);
  stats.slotBytes -= slot->buffer.bytes;
  ++stats.evictions;
  if (slot->unused) ++stats.prefetchesWasted;
  if (isExpected(*slot)) interrupted_ = true;
  retired.push_back(std::move(slot));
}

void SlotQueue::move(const std::shared_ptr<Slot>& slot, Share share) {
  if (slot->share == share) return;
  const bool listed = share == Share::Dirty || slot->pins == 0;
  delist(*slot);
  discharge(*slot);
  charge(*slot, share);
  if (listed) enlist(slot);
}

void SlotQueue::expect(const std::shared_ptr<Slot>& slot, std::uint64_t fetch) {
  slot->expected = fetch;
  slot->epoch = epoch_;
  if (!slot->isListed || slot->share != Share::Passing || slot->isAhead) return;
  delist(*slot);
  enlist(slot);
}

// What was expected goes first from now on.
void SlotQueue::expectNothing() {
  ++epoch_;
  for (const auto& slot : ahead_) slot->isAhead = false;
  passing_.splice(passing_.begin(), ahead_);
  idleBytes_ += std::exchange(aheadBytes_, 0);
}

void SlotQueue::makeRoom(std::size_t bytes, std::size_t ring, Slots& retired) {
  while (passingBytes() + bytes > ring && !passing_.empty()) retire(passing_.front(), retired);
  while (passingBytes() + bytes > ring && !ahead_.empty()) {
    retire(
        *std::max_element(ahead_.begin(), ahead_.end(), [](const auto& a, const auto& b) { return a->expected < b->expected; }),
        retired);
  }
}

void SlotQueue::shrink(std::size_t budget, Slots& retired) {
  while (budgetedBytes() > budget && !staying_.empty()) retire(staying_.front(), retired);
}

void SlotQueue::sort(const std::function<bool(const Slot&)>& stays) {
  const Slots all(staying_.begin(), staying_.end());
  for (const auto& slot : all) {
    if (!stays(*slot)) move(slot, Share::Passing);
  }
}

std::shared_ptr<Slot> SlotQueue::oldestDirty() const {
  const auto found = std::find_if(dirty_.begin(), dirty_.end(), [](const auto& slot) {
    return slot->state == SlotState::Dirty && slot->block->issuing == 0;
  });
  return found == dirty_.end() ? nullptr : *found;
}

void SlotQueue::validate() const {
  auto require = [](bool holds, const char* what) {
    if (!holds) throw Error(std::string("offload: the queue of Slots is inconsistent: ") + what);
  };
  std::size_t idleBytes = 0;
  std::size_t passingIdle = 0;
  std::size_t ahead = 0;
  for (const List* list : {&passing_, &ahead_, &staying_}) {
    const Share share = list == &staying_ ? Share::Staying : Share::Passing;
    for (const auto& slot : *list) {
      if (list == &passing_) passingIdle += slot->buffer.bytes;
      if (list == &ahead_) ahead += slot->buffer.bytes;
      require(slot->isAhead == (list == &ahead_), "a Slot is not where it is expected");
      require(slot->isListed && slot->pins == 0, "a Slot in it is pinned");
      require(slot->share == share, "a Slot is on another account than its list");
      require(slot->state == SlotState::Clean && slot->buffer.data != nullptr, "a Slot in it holds nothing");
      idleBytes += slot->buffer.bytes;
    }
  }
  std::size_t dirtyBytes = 0;
  for (const auto& slot : dirty_) {
    require(slot->isListed && slot->share == Share::Dirty, "a Slot is on another account than its list");
    require(slot->state == SlotState::Dirty || slot->state == SlotState::WritingBack, "what is listed as Dirty is not");
    dirtyBytes += slot->buffer.bytes;
    if (slot->pins == 0) idleBytes += slot->buffer.bytes;
  }
  require(passingIdle == idleBytes_ && ahead == aheadBytes_, "bytes that nothing pins are miscounted");
  require(dirtyBytes == stats.dirtyBytes, "Dirty bytes are miscounted");
  require(idleBytes + stats.pinnedBytes == stats.slotBytes, "bytes are miscounted");
  require(budgetedBytes() <= stats.slotBytes, "the budget is charged with more than there is");
}

} // namespace offload
