// The Slots of one device: the bytes that they hold, and which of them goes next.
#pragma once

#include "core/slot.h"

#include <cstdint>

namespace offload {

using Slots = std::vector<std::shared_ptr<Slot>>;

struct ResidencyStats {
  std::uint64_t fetches = 0;
  std::uint64_t hits = 0;
  std::uint64_t evictions = 0;
  std::size_t slotBytes = 0; // device bytes of Slots now
  std::size_t slotBytesPeak = 0;
  std::size_t pinnedBytes = 0; // of these, bytes that a Pin holds
};

/// Slots that nothing pins are in the queue, the one that has been there longest in front. Guarded by Residency. What is retired
/// leaves its Block and is charged no more; its memory is the caller's to release, outside the lock.
class SlotQueue {
 public:
  /// Charges a new Slot, which has one Pin.
  void add(Slot& slot);
  void pin(Slot& slot);
  /// Lets go of one Pin; a Slot without any joins the queue if it is worth finding again, or else is retired.
  void unpin(const std::shared_ptr<Slot>& slot, bool keep, Slots& retired);
  void retire(std::shared_ptr<Slot> slot, Slots& retired);
  /// Retires from the front of the queue until `bytes` more are within `budget`, or the queue is empty.
  void makeRoom(std::size_t bytes, std::size_t budget, Slots& retired);
  /// Throws Error with what is broken.
  void validate() const;

  ResidencyStats stats;

 private:
  std::list<std::shared_ptr<Slot>> idle_;
};

} // namespace offload
