// The Slots of one device: the bytes that they hold, and which of them goes next.
#pragma once

#include "core/slot.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <utility>

namespace offload {

using Slots = std::vector<std::shared_ptr<Slot>>;

struct ResidencyStats {
  std::uint64_t fetches = 0;
  std::uint64_t hits = 0;
  std::uint64_t evictions = 0;
  std::uint64_t updates = 0; // pieces of work that changed Blocks in the cache
  std::uint64_t readsInPlace = 0; // by the device, of host bytes where they are
  std::uint64_t bytesReadInPlace = 0;
  std::uint64_t prefetches = 0; // copies that were made ahead of a fetch
  std::uint64_t prefetchesWasted = 0; // and given up before one
  std::size_t slotBytes = 0; // device bytes of Slots now
  std::size_t slotBytesPeak = 0;
  std::uint64_t slotBytesEver = 0; // of all Slots that there have been
  std::size_t pinnedBytes = 0; // of these, bytes that a Pin holds
  std::size_t stayingBytes = 0; // bytes on the budget's account
  std::size_t dirtyBytes = 0; // and bytes that are newer than the host's
};

/// Every Slot from add() until it is retired is in one list: Dirty ones by themselves, of the others those that are pinned, and those
/// that nothing pins by their share; the one that has been there longest is in front, but for keepLonger(). Of what is passing,
/// results on their way home are listed apart and go after the rest, unless they and the write buffer take more than half of the ring;
/// what is expected to be fetched soon goes last, but before results where it takes more than half of the ring. The write buffer is
/// that part of the ring which the first Dirty bytes are charged to, as there are such without a budget, too. It has room for one
/// addend of whatever size: a result that is only to be added to a gradient is gone before a copy of it would be home, and the addition
/// would have to fetch it again. Guarded by Residency. What is retired leaves its Block and is charged no
/// more; its memory is the caller's to release, outside the lock.
class SlotQueue {
 public:
  void setWriteBuffer(std::size_t bytes) noexcept {
    writeBuffer_ = bytes;
  }
  /// A Dirty Slot is the last addend.
  void setAddend(const Slot& slot) noexcept {
    addend_ = &slot;
  }
  /// Charges a new Slot, which has one Pin.
  void add(const std::shared_ptr<Slot>& slot, Share share);
  void pin(const std::shared_ptr<Slot>& slot);
  /// Lets go of one Pin; a Slot without any is listed if it is worth finding again, or else is retired.
  void unpin(const std::shared_ptr<Slot>& slot, bool keep, Slots& retired);
  void retire(std::shared_ptr<Slot> slot, Slots& retired);
  /// Charges another account.
  void move(const std::shared_ptr<Slot>& slot, Share share);
  /// What is Dirty and pinned passes from now on, as a copy to the host has been enqueued.
  void leave(const std::shared_ptr<Slot>& slot);

  /// Notes how many fetches there have been.
  void advance(std::uint64_t fetches) noexcept {
    now_ = fetches;
  }
  /// The fetch of this number will want the Slot.
  void expect(const std::shared_ptr<Slot>& slot, std::uint64_t fetch);
  /// Nothing that was expected is so any more.
  void expectNothing();
  /// It is the last to go of the list that it is in.
  void keepLonger(const Slot& slot);
  bool isExpected(const Slot& slot) const noexcept {
    return slot.epoch == epoch_ && slot.expected > now_;
  }
  /// Whether something has been retired that is expected, since this was asked last.
  bool wasInterrupted() noexcept {
    return std::exchange(interrupted_, false);
  }

  /// Retires Slots that are passing until `bytes` more are within `ring`, or all that are left are pinned. Whether any of them was
  /// expected, and beyond half of the ring.
  bool makeRoom(std::size_t bytes, std::size_t ring, Slots& retired);
  /// The same, but leaves half of the ring to those that are expected.
  bool dropPassed(std::size_t bytes, std::size_t ring, Slots& retired);
  /// Retires Slots of this purpose that nothing pins and that are, or were, on their way home until they are within `most`.
  void dropLeaving(Purpose purpose, std::size_t most, Slots& retired);
  /// Retires Slots that stay until they and Dirty ones are within `budget`, or all that are left are pinned.
  void shrink(std::size_t budget, Slots& retired);
  /// Lets those pass of which `stays` is false.
  void sort(const std::function<bool(const Slot&)>& stays);
  /// Retires the one that has stayed for longest; false if there is none that nothing pins.
  bool dropStaying(Slots& retired);
  /// Null if there is none that nobody is busy with, or may change, and that was not used since there had been so many fetches. The addend
  /// only if it is to be, too.
  std::shared_ptr<Slot> oldestDirty(bool addendToo, std::uint64_t unusedSince = UINT64_MAX);

  std::size_t dirtyCount() const noexcept {
    return dirty_.size();
  }
  /// Of what is Dirty, bytes that the write buffer holds.
  std::size_t bufferedBytes() const noexcept {
    return std::min(stats.dirtyBytes, addend_ != nullptr ? std::max(writeBuffer_, addend_->buffer.bytes) : writeBuffer_);
  }
  /// And what of it is no gradient, beyond that.
  std::size_t resultBytes() const noexcept {
    return resultBytes_ - std::min(resultBytes_, bufferedBytes());
  }
  /// Of these, bytes that were not used since there had been so many fetches, in the write buffer or not.
  std::size_t unusedBytes(std::uint64_t since) const;
  std::size_t passingBytes() const noexcept {
    return stats.slotBytes - budgetedBytes();
  }
  std::size_t budgetedBytes() const noexcept {
    return stats.stayingBytes + stats.dirtyBytes - bufferedBytes();
  }
  /// How often expectations turned out to be wrong: copies given up that had been made by then are of one wrong guess.
  std::uint64_t wrongGuesses() const noexcept {
    return wrongGuesses_;
  }
  /// The copies given up; but for those that only had no room.
  std::uint64_t wrongCopies() const noexcept {
    return wrongCopies_;
  }
  /// Bytes that wait for the fetch that is expected.
  std::size_t aheadBytes() const noexcept {
    return aheadBytes_;
  }
  /// Bytes that nothing pins and that are, or were, on their way home.
  std::size_t leavingBytes() const noexcept {
    return leavingBytes_;
  }
  /// Bytes that should not make room: what is pinned, expected, buffered or, up to half of the ring with that, on its way home.
  std::size_t keptBytes(std::size_t ring) const;
  /// Walks every Slot; throws Error with what is broken.
  void validate(const std::function<void(const std::shared_ptr<Slot>&)>& visit) const;

  ResidencyStats stats;

 private:
  using List = std::list<std::shared_ptr<Slot>>;
  class Furthest;

  std::size_t mostLeaving(std::size_t ring) const noexcept;
  List& listOf(const Slot& slot);
  std::size_t* accountOf(const Slot& slot);
  void tally(const List& list, const Slot& slot, bool in);
  void relist(Slot& slot, List& from);
  void charge(Slot& slot, Share share);
  void discharge(Slot& slot);

  List passing_;
  List leaving_;
  List ahead_;
  List staying_;
  List dirty_;
  List pinned_;
  std::size_t writeBuffer_ = 0;
  const Slot* addend_ = nullptr; // while it is Dirty
  std::size_t resultBytes_ = 0; // of dirty_, but for gradients
  std::uint64_t dirtyUsedSince_ =
      0; // all of dirty_ has been used since there had been so many fetches: it need not be looked through
  std::size_t idleBytes_ = 0; // of passing_
  std::size_t leavingBytes_ = 0;
  std::array<std::size_t, kPurposes.size()> leavingOf_{}; // of these, by what they are for
  std::size_t aheadBytes_ = 0;
  std::uint64_t now_ = 0;
  std::uint64_t epoch_ = 1;
  std::uint64_t latest_ = 0; // of the fetches for which something has been expected
  std::uint64_t paidUntil_ = 0; // up to which of them wrong guesses have been counted
  std::uint64_t wrongGuesses_ = 0;
  std::uint64_t wrongCopies_ = 0;
  bool interrupted_ = false;
};

} // namespace offload
