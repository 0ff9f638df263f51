// Device bytes that hold an extent of a Block.
#pragma once

#include "core/block.h"

#include <array>
#include <cassert>
#include <list>
#include <memory>
#include <optional>

namespace offload {

class CapturedFetches;

/// Device memory with its way back; whoever holds one gives it back.
struct DeviceBuffer {
  void* data = nullptr;
  std::size_t bytes = 0; // of all that is held; where there is an owner, data may be within it
  /// The stream on which the memory may be used again after it has been given back.
  Stream home;
  /// Set where the memory belongs to somebody else (a tensor of PyTorch's); null for memory of Link::allocate().
  std::shared_ptr<void> owner;
};

/// Note [Slot states]
///
///   Fetching -> Clean -> Gone           a fetched extent
///   Dirty -> WritingBack -> Clean       an adopted result: newer than the host until it has been sent home
///            WritingBack -> Dirty       where the Link refused to
///   Clean -> Dirty                      what is changed in place
///
/// Fetching lasts while the copy is being enqueued, not while it runs: from then on `ready` gives the order. Gone slots have no
/// memory; a Pin may outlive its Block, but never its Slot's memory.
enum class SlotState : unsigned char { Fetching, Clean, Dirty, WritingBack, Gone };

inline constexpr std::array<std::pair<SlotState, SlotState>, 8> kSlotTransitions{{
    {SlotState::Fetching, SlotState::Clean},
    {SlotState::Fetching, SlotState::Gone},
    {SlotState::Clean, SlotState::Gone},
    {SlotState::Clean, SlotState::Dirty},
    {SlotState::Dirty, SlotState::WritingBack},
    {SlotState::Dirty, SlotState::Gone},
    {SlotState::WritingBack, SlotState::Clean},
    {SlotState::WritingBack, SlotState::Dirty},
}};

constexpr bool mayBecome(SlotState from, SlotState to) {
  for (const auto& [a, b] : kSlotTransitions) {
    if (a == from && b == to) return true;
  }
  return false;
}

/// On whose account a Slot's bytes are.
enum class Share : unsigned char {
  Passing, // of the ring
  Staying, // of the budget: the Schedule wants it again
  Dirty, // newer than the host: of the budget, but for what the write buffer holds
};

/// Guarded by Residency.
struct Slot {
  void become(SlotState next) {
    assert(mayBecome(state, next));
    state = next;
  }

  Block* block = nullptr; // the Block that lists it; null before, and once the Block is gone
  Extent extent; // within the Block
  int device = 0;
  SlotState state = SlotState::Fetching;
  std::uint64_t version = 0;
  std::optional<std::uint64_t> fileFailures; // of its Block's file when the bytes were asked for, where they came from there
  DeviceBuffer buffer;
  std::byte* data = nullptr; // where the extent begins within the buffer
  const void* host = nullptr; // where it begins in host memory; for an Observer, also when the Block is gone
  Purpose purpose = Purpose::Temporary; // of the Block, likewise
  const void* derivedFrom = nullptr; // and this
  /// The graph that it is part of, with memory of Staging; no Block or SlotQueue has it then, and only its Pin.
  std::shared_ptr<CapturedFetches> captured;
  /// The last write to the device bytes.
  Token ready;
  /// What reads the device bytes, besides what its Pins still may.
  TokenSet readers;
  int pins = 0;
  Share share = Share::Passing;
  /// The latest fetch that is expected to ask for it, by its number and the SlotQueue's epoch.
  std::uint64_t expected = 0;
  std::uint64_t epoch = 0;
  std::uint64_t expectedNext = 0; // the first of several such fetches; where that has been, the latest is as good a guess
  bool isAhead = false; // as of when it was listed last
  /// A result whose bytes are being copied home, or have been.
  bool isLeaving = false;
  /// Who has it pinned may change its bytes, as of beforeChange().
  bool mayChange = false;
  /// How many fetches there had been when it was made, or pinned last.
  std::uint64_t lastUse = 0;
  /// It was fetched ahead, and nobody has asked for it yet.
  bool unused = false;
  /// Place in its SlotQueue, from when it is charged until it is retired.
  std::list<std::shared_ptr<Slot>>::iterator place;
};

/// Adds it to the list of its Block, and takes it off, without a walk over all of these: a loop over the rows of a tensor makes many.
void listSlot(const std::shared_ptr<Slot>& slot);
void unlistSlot(const std::shared_ptr<Slot>& slot) noexcept;
/// Whether the newest bytes of its Block are here: nobody has written since, and no read of its file has failed.
inline bool holdsNewest(const Slot& slot, const Block& block) {
  return slot.version == block.version && (!slot.fileFailures || slot.fileFailures == block.file->failures());
}

/// One of a device that holds the newest bytes of the extent; null if there is none.
std::shared_ptr<Slot> newestSlot(const Block& block, Extent extent, int device) noexcept;

} // namespace offload
