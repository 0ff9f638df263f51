// The host bytes of one storage.
#pragma once

#include "core/extent.h"
#include "core/file_bytes.h"
#include "core/purpose.h"
#include "core/token.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace offload {

class SharedMemory;
struct Slot;

enum class BlockKind {
  Pinned, // page-locked memory of the Arena
  Pageable, // memory of the Arena that the system would not lock, or where there is nothing to copy to
  Foreign, // memory of somebody else, kept alive by the Block's owner
  Shared, // memory that other processes map too, page-locked where that may be
};

/// Where a storage's first value came about. It never changes, so where an operation computes does not depend on what the cache holds.
/// Memory that was never written to, or filled with a constant alone, has no value yet: the first one decides.
enum class Born { Host, Device, Undecided };

/// Plain data; Residency guards what changes.
struct Block {
  Block(void* hostData, std::size_t size, BlockKind blockKind, Born where, int deviceIndex)
      : data(hostData), bytes(size), kind(blockKind), born(where), device(deviceIndex) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* const data;
  const std::size_t bytes;
  const BlockKind kind;
  /// Changed once, from Undecided.
  std::atomic<Born> born;
  /// Raised by HostAccounts::claim() alone, at any time.
  std::atomic<Purpose> purpose = Purpose::Temporary;
  /// Whether it counts as bytes of a file. HostAccounts' own.
  bool countsAsFile = false;
  const int device; // the index i of `offload:i`, and of the device that it is paired with

  /// Counts writes; the newest bytes have this version, wherever they are.
  std::uint64_t version = 0;
  /// The version that the host bytes hold once `writers` is done. Less than `version` exactly while a Slot is Dirty.
  std::uint64_t hostVersion = 0;
  /// Copies into the host bytes, and copies out of them.
  TokenSet writers;
  TokenSet readers;
  /// Threads that are about to enqueue a copy from or to these bytes; nobody waits for tokens before it is zero.
  int issuing = 0;
  /// Jobs that are to read or write them: Note [Host jobs]. Each is one of `issuing`.
  int claims = 0;
  /// Those of them that write.
  int writing = 0;
  int leases = 0;
  /// How often a device result became its value since the host read it last.
  std::uint32_t adoptions = 0;
  /// Such a result is copied to the host at once. Set before the first.
  bool goesHome = false;
  /// Of a gradient, of what is only to be added to one, and of a copy in another dtype: where the host bytes begin of what it is the
  /// gradient or the copy of, as a name only; null where that isn't known.
  const void* derivedFrom = nullptr;
  /// For Schedule: how often any extent was fetched, and whether it knows one.
  std::uint64_t fetches = 0;
  bool scheduled = false;
  /// By where their extents begin (slot.h), of which none is longer than this.
  std::vector<std::shared_ptr<Slot>> slots;
  std::size_t longest = 0;
  /// How many own the Block: the glue's, as the rest is Residency's.
  std::atomic<int> owners{1};
  /// Keeps Foreign memory alive.
  std::shared_ptr<void> owner;
  /// Of a Shared Block: its memory, and the version there that `version` accounts for.
  std::shared_ptr<SharedMemory> shared;
  std::uint64_t seenVersion = 0;
  /// What the glue keeps with the bytes, and guards: a copy in another dtype.
  std::shared_ptr<void> copy;
  /// Set where the memory is a mapping of a file: Note [File-backed Blocks].
  std::shared_ptr<FileBytes> file;

  /// What device copies keep the remainder of, by kAlignment. A tensor's place in a file says nothing of how it is to be aligned.
  std::uintptr_t address() const noexcept {
    return file ? 0 : reinterpret_cast<std::uintptr_t>(data);
  }
};

} // namespace offload
