// The copy streams of one device.
#pragma once

#include "core/bounce_ring.h"
#include "core/executor.h"
#include "core/file_bytes.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>

namespace offload {

struct TransferOptions {
  /// Each copy, or what is copied at once, waits this long on its stream first, for tests.
  std::chrono::microseconds delay{0};
  /// Memory that is not page-locked is copied in pieces of this size. Small pieces fill the driver's queue, which takes about 50 of
  /// them (on an H200, with CUDA 13), and large ones leave the link idle at both ends of a copy.
  std::size_t chunkBytes = std::size_t{8} << 20;
  /// Of copies that may be enqueued at once, smaller ones get a call each, which moves them faster.
  std::size_t leastAtOnce = std::size_t{64} << 10;
};

struct TransferStats {
  std::uint64_t bytesToDevice = 0;
  std::uint64_t bytesToHost = 0;
  std::uint64_t copiesToDevice = 0;
  std::uint64_t copiesToHost = 0;
  std::size_t ringBytes = 0; // host memory of the rings
};

/// What the host end of a copy is.
enum class HostMemory { Pinned, Pageable };

/// One stream for each direction, so that the link carries both at once, and beside it host tasks and a ring of page-locked chunks
/// for memory that is pageable: see Note [Bounce ring]. Nothing here waits on the host, but where the ring can't be had, copies
/// of pageable memory do so in the Link. Threads may copy at once.
class Transfer {
 public:
  Transfer(Link& link, EventPool& events, int device, TransferOptions options = {});
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Copies after all of `after`; the token says that the whole is done. `reads`, given empty, gets what tells that the host bytes
  /// have been read, also where this throws midway. What is then on its way to the device is in the order of deviceBound().
  Token toDevice(
      void* device, const void* host, std::size_t bytes, HostMemory memory, std::span<const Token> after, TokenSet& reads);
  /// The same for several pieces of page-locked memory; the token is for all of them. Enqueued with as few calls as that is good for.
  Token allToDevice(std::vector<Copy> copies, std::span<const Token> after, TokenSet& reads);
  /// Like toDevice(), the other way; `uses` gets what tells that neither end is used any more.
  Token toHost(
      void* host, const void* device, std::size_t bytes, HostMemory memory, std::span<const Token> after, TokenSet& uses);
  /// Like toDevice(), from a file. Reads that fail are kept in `errors`, which outlives this. Throws OutOfMemory where the system has
  /// no memory to read into.
  Token fileToDevice(
      void* device, const std::shared_ptr<FileBytes>& file, Extent extent, std::span<const Token> after, TokenSet& reads,
      DeferredError& errors);

  /// Where memory that is filled by toDevice() is allocated and given back.
  Stream deviceBound() const noexcept {
    return toDevice_.stream.get();
  }
  Stream hostBound() const noexcept {
    return toHost_.stream.get();
  }
  /// Waits on the host for all copies.
  void drain();
  /// Returns the host memory of the rings to the system. What copies use meanwhile stays.
  void trimRings();

  TransferStats stats() const;

 private:
  struct Lane {
    Lane(Link& link, EventPool& events, int device, std::size_t chunkBytes)
        : stream(link, device), executor(link, events, device), ring(link, chunkBytes) {}
    const OwnedStream stream;
    Executor executor;
    BounceRing ring; // goes first: it waits for what uses it
  };

  /// The task that fills a chunk with `bytes` bytes of the host's, from `at` on.
  using Filling = std::function<HostTask(std::byte* chunk, std::size_t at, std::size_t bytes)>;

  Token bounceToDevice(
      BounceRing& ring, BounceRing::Taken chunk, std::byte* device, std::size_t bytes, const Filling& filling,
      std::span<const Token> after, TokenSet& reads);
  Token bounceToHost(BounceRing::Taken chunk, std::byte* host, const std::byte* device, std::size_t bytes, TokenSet& uses);
  void send(void* device, const void* host, std::size_t bytes);
  void sendAtOnce(std::span<const Copy> copies);
  void receive(void* host, const void* device, std::size_t bytes);
  void sleep(Stream stream);

  Link& link_;
  EventPool& events_;
  const std::chrono::microseconds delay_;
  const std::size_t leastAtOnce_;
  Lane toDevice_;
  Lane toHost_;
  BounceRing files_; // for toDevice_; goes first, too
  std::atomic<std::uint64_t> bytesToDevice_{0};
  std::atomic<std::uint64_t> bytesToHost_{0};
  std::atomic<std::uint64_t> copiesToDevice_{0};
  std::atomic<std::uint64_t> copiesToHost_{0};
};

} // namespace offload
