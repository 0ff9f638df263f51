#include "core/slot_queue.h"

#include "core/error.h"

#include <algorithm>

namespace offload {
namespace {

bool isResult(const Slot& slot) {
  return slot.share == Share::Dirty && slot.purpose != Purpose::Gradient;
}

} // namespace

SlotQueue::List& SlotQueue::listOf(const Slot& slot) {
  if (slot.share == Share::Dirty) return dirty_;
  if (slot.pins > 0) return pinned_;
  if (slot.share == Share::Staying) return staying_;
  if (slot.isAhead) return ahead_;
  return slot.isLeaving ? leaving_ : passing_;
}

std::size_t* SlotQueue::accountOf(const Slot& slot) {
  if (slot.share == Share::Passing) return nullptr;
  return slot.share == Share::Dirty ? &stats.dirtyBytes : &stats.stayingBytes;
}

void SlotQueue::tally(const List& list, const Slot& slot, bool in) {
  const auto count = [bytes = slot.buffer.bytes, in](std::size_t& sum) { in ? sum += bytes : sum -= bytes; };
  if (&list == &passing_) count(idleBytes_);
  if (&list == &ahead_) count(aheadBytes_);
  if (&list != &leaving_) return;
  count(leavingBytes_);
  count(leavingOf_[static_cast<std::size_t>(slot.purpose)]);
}

// To the end of the list that it belongs to now, if that is another.
void SlotQueue::relist(Slot& slot, List& from) {
  slot.isAhead = isExpected(slot);
  List& to = listOf(slot);
  if (&to == &from) return;
  to.splice(to.end(), from, slot.place);
  tally(from, slot, false);
  tally(to, slot, true);
}

void SlotQueue::charge(Slot& slot, Share share) {
  slot.share = share;
  if (share == Share::Staying) slot.isLeaving = false;
  if (auto* account = accountOf(slot)) *account += slot.buffer.bytes;
  if (isResult(slot)) resultBytes_ += slot.buffer.bytes;
  if (share == Share::Dirty) dirtyUsedSince_ = std::min(dirtyUsedSince_, slot.lastUse);
}

void SlotQueue::discharge(Slot& slot) {
  if (&slot == addend_) addend_ = nullptr;
  if (auto* account = accountOf(slot)) *account -= slot.buffer.bytes;
  if (isResult(slot)) resultBytes_ -= slot.buffer.bytes;
}

void SlotQueue::add(const std::shared_ptr<Slot>& slot, Share share) {
  slot->pins = 1;
  slot->lastUse = now_;
  stats.slotBytes += slot->buffer.bytes;
  stats.pinnedBytes += slot->buffer.bytes;
  stats.slotBytesPeak = std::max(stats.slotBytesPeak, stats.slotBytes);
  stats.slotBytesEver += slot->buffer.bytes;
  charge(*slot, share);
  List& list = listOf(*slot);
  slot->place = list.insert(list.end(), slot);
}

void SlotQueue::pin(const std::shared_ptr<Slot>& slot) {
  List& from = listOf(*slot);
  slot->lastUse = now_;
  if (slot->pins++ > 0) return;
  stats.pinnedBytes += slot->buffer.bytes;
  relist(*slot, from);
}

void SlotQueue::unpin(const std::shared_ptr<Slot>& slot, bool keep, Slots& retired) {
  List& from = listOf(*slot);
  if (--slot->pins > 0) return;
  slot->mayChange = false;
  stats.pinnedBytes -= slot->buffer.bytes;
  relist(*slot, from);
  const bool newest = slot->block != nullptr && holdsNewest(*slot, *slot->block);
  if (newest && slot->share == Share::Dirty) return;
  if (!keep || !newest || slot->state != SlotState::Clean) retire(slot, retired);
}

void SlotQueue::retire(std::shared_ptr<Slot> slot, Slots& retired) {
  List& list = listOf(*slot);
  list.erase(slot->place);
  tally(list, *slot, false);
  discharge(*slot);
  if (slot->block != nullptr) unlistSlot(slot);
  slot->become(SlotState::Gone);
  stats.slotBytes -= slot->buffer.bytes;
  ++stats.evictions;
  if (slot->unused) {
    ++stats.prefetchesWasted;
    ++wrongCopies_;
    if (slot->expected > paidUntil_) {
      ++wrongGuesses_;
      paidUntil_ = latest_;
    }
  }
  if (isExpected(*slot)) interrupted_ = true;
  retired.push_back(std::move(slot));
}

void SlotQueue::move(const std::shared_ptr<Slot>& slot, Share share) {
  if (slot->share == share) return;
  List& from = listOf(*slot);
  discharge(*slot);
  charge(*slot, share);
  relist(*slot, from);
}

void SlotQueue::leave(const std::shared_ptr<Slot>& slot) {
  slot->isLeaving = true;
  move(slot, Share::Passing);
}

/// Finds what is expected last of what is ahead, one after another. A Slot may be expected several times; the next of them counts.
class SlotQueue::Furthest {
 public:
  explicit Furthest(const SlotQueue& queue) : queue_(queue) {}

  std::shared_ptr<Slot> take() {
    const auto sooner = [now = queue_.now_](const auto& a, const auto& b) { return nextOf(*a, now) < nextOf(*b, now); };
    if (heap_.empty()) {
      heap_.assign(queue_.ahead_.begin(), queue_.ahead_.end());
      std::ranges::make_heap(heap_, sooner);
    }
    std::ranges::pop_heap(heap_, sooner);
    auto last = std::move(heap_.back());
    heap_.pop_back();
    return last;
  }

 private:
  static std::uint64_t nextOf(const Slot& slot, std::uint64_t now) {
    return slot.expectedNext > now ? slot.expectedNext : slot.expected;
  }

  const SlotQueue& queue_;
  Slots heap_;
};

bool SlotQueue::makeRoom(std::size_t bytes, std::size_t ring, Slots& retired) {
  const bool calledBack = dropPassed(bytes, ring, retired);
  Furthest furthest(*this);
  while (passingBytes() + bytes > ring && !ahead_.empty()) retire(furthest.take(), retired);
  return calledBack;
}

// Results have half of the ring, those in the write buffer first.
std::size_t SlotQueue::mostLeaving(std::size_t ring) const noexcept {
  return ring / 2 - std::min(ring / 2, bufferedBytes());
}

bool SlotQueue::dropPassed(std::size_t bytes, std::size_t ring, Slots& retired) {
  bool calledBack = false;
  Furthest furthest(*this);
  const std::size_t most = mostLeaving(ring);
  while (passingBytes() + bytes > ring) {
    if (leavingBytes_ <= most && !passing_.empty()) {
      retire(passing_.front(), retired);
    } else if (leavingBytes_ <= most && aheadBytes_ > ring / 2) {
      const auto last = furthest.take();
      if (std::exchange(last->unused, false)) ++stats.prefetchesWasted; // the guess may have been right
      retire(last, retired);
      calledBack = true;
    } else if (!leaving_.empty()) {
      retire(leaving_.front(), retired);
    } else {
      break;
    }
  }
  return calledBack;
}

void SlotQueue::dropLeaving(Purpose purpose, std::size_t most, Slots& retired) {
  const std::size_t& bytes = leavingOf_[static_cast<std::size_t>(purpose)];
  for (auto at = leaving_.begin(); bytes > most;) {
    const auto oldest = *at++;
    if (oldest->purpose == purpose) retire(oldest, retired);
  }
}

std::size_t SlotQueue::keptBytes(std::size_t ring) const {
  return passingBytes() - idleBytes_ - leavingBytes_ + std::min(leavingBytes_, mostLeaving(ring));
}

void SlotQueue::expect(const std::shared_ptr<Slot>& slot, std::uint64_t fetch) {
  List& from = listOf(*slot);
  if (!isExpected(*slot) || slot->expectedNext <= now_) slot->expectedNext = isExpected(*slot) ? slot->expected : fetch;
  slot->expected = fetch;
  latest_ = std::max(latest_, fetch);
  slot->epoch = epoch_;
  relist(*slot, from);
}

// What was expected goes first from now on.
void SlotQueue::expectNothing() {
  ++epoch_;
  for (const auto& slot : ahead_) slot->isAhead = slot->isLeaving = false;
  passing_.splice(passing_.begin(), ahead_);
  idleBytes_ += std::exchange(aheadBytes_, 0);
}

void SlotQueue::keepLonger(const Slot& slot) {
  List& list = listOf(slot);
  list.splice(list.end(), list, slot.place);
}

void SlotQueue::shrink(std::size_t budget, Slots& retired) {
  while (budgetedBytes() > budget && !staying_.empty()) retire(staying_.front(), retired);
}

bool SlotQueue::dropStaying(Slots& retired) {
  if (staying_.empty()) return false;
  retire(staying_.front(), retired);
  return true;
}

void SlotQueue::sort(const std::function<bool(const Slot&)>& stays) {
  const Slots all(staying_.begin(), staying_.end());
  for (const auto& slot : all) {
    if (!stays(*slot)) move(slot, Share::Passing);
  }
}

std::size_t SlotQueue::unusedBytes(std::uint64_t since) const {
  std::size_t bytes = 0;
  for (const auto& slot : dirty_) bytes += isResult(*slot) && slot->lastUse < since ? slot->buffer.bytes : 0;
  return bytes;
}

std::shared_ptr<Slot> SlotQueue::oldestDirty(bool addendToo, std::uint64_t unusedSince) {
  if (unusedSince <= dirtyUsedSince_) return nullptr;
  bool anyOld = false;
  for (const auto& slot : dirty_) {
    if (unusedSince != UINT64_MAX && slot->lastUse >= unusedSince) continue;
    anyOld = true;
    if (slot->state != SlotState::Dirty || (!addendToo && slot.get() == addend_)) continue;
    const bool busy = slot->mayChange || slot->block->issuing > 0 || slot->block->leases > 0;
    if (!busy) return slot;
  }
  if (!anyOld && unusedSince != UINT64_MAX) dirtyUsedSince_ = unusedSince;
  return nullptr;
}

void SlotQueue::validate(const std::function<void(const std::shared_ptr<Slot>&)>& visit) const {
  auto require = [](bool holds, const char* what) {
    if (!holds) throw Error(std::string("offload: the queue of Slots is inconsistent: ") + what);
  };
  ResidencyStats sum;
  std::size_t results = 0;
  std::size_t idle = 0;
  std::size_t leaving = 0;
  decltype(leavingOf_) leavingOf{};
  std::size_t ahead = 0;
  for (const List* list : {&passing_, &leaving_, &ahead_, &staying_, &dirty_, &pinned_}) {
    for (auto at = list->begin(); at != list->end(); ++at) {
      const auto& slot = *at;
      require(slot != nullptr && slot->place == at, "a Slot is in another place than it knows");
      require(
          (list == &dirty_) == (slot->share == Share::Dirty),
          "a Slot is listed with Dirty ones and is none, or is one elsewhere");
      if (list == &pinned_) require(slot->pins > 0, "a Slot that nothing pins is listed as pinned");
      if (list == &passing_) idle += slot->buffer.bytes;
      if (list == &leaving_) leaving += slot->buffer.bytes;
      if (list == &leaving_) leavingOf[static_cast<std::size_t>(slot->purpose)] += slot->buffer.bytes;
      if (list == &ahead_) ahead += slot->buffer.bytes;
      if (list != &dirty_ && list != &pinned_) {
        require((list == &ahead_) == (slot->isAhead && slot->share == Share::Passing), "a Slot is not where it is expected");
        require(list != &leaving_ || slot->isLeaving, "a Slot that stays here is listed as on its way home");
        require(slot->pins == 0, "a Slot that could go is pinned");
        require((list == &staying_) == (slot->share == Share::Staying), "a Slot is on another account than its list");
        require(slot->state == SlotState::Clean && slot->block != nullptr, "a Slot that could be found again holds nothing");
      }
      const bool dirty = slot->state == SlotState::Dirty || slot->state == SlotState::WritingBack;
      require(slot->pins >= 0 && slot->state != SlotState::Gone, "a retired Slot is listed");
      require(slot->share != Share::Dirty || dirty, "what is listed as Dirty is not");
      require(slot->pins > 0 || slot->buffer.data != nullptr, "a Slot has no memory");
      sum.slotBytes += slot->buffer.bytes;
      if (slot->pins > 0) sum.pinnedBytes += slot->buffer.bytes;
      if (slot->share == Share::Staying) sum.stayingBytes += slot->buffer.bytes;
      if (slot->share == Share::Dirty) sum.dirtyBytes += slot->buffer.bytes;
      if (isResult(*slot)) results += slot->buffer.bytes;
      visit(slot);
    }
  }
  const bool counted = idle == idleBytes_ && leaving == leavingBytes_ && leavingOf == leavingOf_ && ahead == aheadBytes_;
  require(counted, "bytes that nothing pins are miscounted");
  require(sum.slotBytes == stats.slotBytes, "bytes are miscounted");
  require(sum.pinnedBytes == stats.pinnedBytes, "pinned bytes are miscounted");
  require(sum.stayingBytes == stats.stayingBytes, "bytes that stay are miscounted");
  require(sum.dirtyBytes == stats.dirtyBytes && results == resultBytes_, "Dirty bytes are miscounted");
  require(stats.slotBytes <= stats.slotBytesPeak, "the peak is below what there is");
}

} // namespace offload
