// Host memory that several processes map.
//
// Note [Shared memory]
// It is a memfd: a file that has no name, that every process reaches by a descriptor which another one has sent it, and that the
// kernel frees when the last mapping and the last descriptor are gone, however their processes end. It is not limited by /dev/shm,
// which is small in containers. All of its pages are taken when it is made, and its size is sealed: no process meets a bus error at
// an access because there is no memory, or because another one has cut it short.
//
// The first page is a header with what is common to all processes. Its version counts the writes of all of them. A process
// counts up when the bytes of a write have landed in the memory, and reads the count before it copies out of it. So who finds the
// count that he knew has all that was finished by then; a write that is still going on counts later, and outdates what was copied
// meanwhile. Blocks have versions of their own beside it, which no other process knows: see Residency.
//
// Its descriptor stays open for as long as the mapping: nothing else lets it be sent to one more process.
#pragma once

#include "core/block.h"

#include <atomic>

namespace offload {

/// One process's mapping. Whether it is page-locked is the Arena's affair.
class SharedMemory {
 public:
  /// Throws Error unless the process may open another descriptor, and some for the rest of the program. Where its limit is in
  /// the way, raises that, up to the hard one.
  static void requireDescriptor();
  /// Zeroed memory for a storage. Throws OutOfMemory.
  static std::unique_ptr<SharedMemory> create(std::size_t bytes, Born born);
  /// What another process, or this one, has created. Takes the descriptor, also where it throws: Error.
  static std::unique_ptr<SharedMemory> open(int descriptor);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const noexcept;
  /// Of the storage.
  std::size_t bytes() const noexcept;
  Born born() const noexcept;
  /// Of the whole mapping, which begins with the header.
  void* mapped() const noexcept {
    return mapped_;
  }
  std::size_t mappedBytes() const noexcept {
    return mappedBytes_;
  }
  /// Stays this object's own.
  int descriptor() const noexcept {
    return descriptor_;
  }

  std::uint64_t version() const noexcept;
  /// Counts a write; the version before it.
  std::uint64_t bump() noexcept;

  bool pinned = false;

 private:
  struct Header;

  explicit SharedMemory(int descriptor) : descriptor_(descriptor) {}
  bool map(std::size_t bytes) noexcept;
  Header& header() const noexcept;

  const int descriptor_;
  void* mapped_ = nullptr;
  std::size_t mappedBytes_ = 0;
};

} // namespace offload
