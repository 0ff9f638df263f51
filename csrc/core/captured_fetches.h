// What fetches become while a CUDA graph is captured, and what its replays need.
//
// Note [Captured fetches]
// A replay uses the addresses that were captured. A Slot may be gone by then, so a captured fetch doesn't ask the cache: it captures a copy
// from the host bytes, which keep their place as long as the graph keeps their Block, to Staging. The copies are captured on a stream of
// their own, behind nothing but the last use of the memory that they fill: in a replay they run ahead of the operations, as far as the
// ring's bytes go.
//
// A replay is ordered as any reader of the host bytes is. Before it what is newer on a device goes home and the host's jobs on these
// Blocks are done (beginReplay); what writes to them later waits for it (endReplay). So somebody has to tell when there is one.
#pragma once

#include "core/held_copies.h"
#include "core/slot.h"
#include "core/stream_set.h"

#include <chrono>
#include <deque>
#include <functional>
#include <unordered_map>
#include <unordered_set>

namespace offload {

struct CaptureOptions {
  std::size_t stagingBytes = 0; // of all graphs of the device, as far as what is free again is of the right size
  std::size_t heldBytes = 0; // likewise, of held copies
  bool poison = false;
  std::chrono::microseconds copyDelay{0};
};

/// The copies of one graph. Threads may capture at once.
class CapturedFetches : public std::enable_shared_from_this<CapturedFetches> {
 public:
  /// Makes one more owner of a Block; who gets it keeps it.
  using Keep = std::function<std::shared_ptr<void>(Block&)>;

  /// `id` is Link::captureOf(`origin`).
  CapturedFetches(
      Link& link, EventPool& events, std::shared_ptr<Staging> staging, std::shared_ptr<HeldCopies> copies, Stream origin,
      std::uint64_t id, Keep keep, CaptureOptions options);
  ~CapturedFetches();
  CapturedFetches(const CapturedFetches&) = delete;
  CapturedFetches& operator=(const CapturedFetches&) = delete;

  /// A held copy of these bytes, with memory by `allocate` if it is the first; null where there is no room for one.
  const HeldCopy* hold(Block& block, Extent extent, const std::function<void*(std::size_t)>& allocate);
  /// Copies the host's bytes to a held copy, on a stream that is not captured.
  void refresh(const HeldCopy& copy, Stream stream) const;
  /// Staging for so many bytes, by `allocate` where there is none. `allocate` is called under no lock, and may throw.
  Staging::BufferPtr take(std::size_t bytes, const std::function<void*(std::size_t)>& allocate);
  /// Captures the copy of a Slot's bytes to its memory, which take() gave, and has `stream` wait for it.
  void copy(Block& block, const Slot& slot, Stream stream);
  /// The last Pin of a Slot has gone; work on `streams` may have used it.
  void release(Slot& slot, const StreamSet& streams) noexcept;
  /// The capture has ended.
  void end();

  std::uint64_t id() const noexcept {
    return id_;
  }
  int device() const noexcept {
    return copies_.device;
  }
  Staging& staging() const noexcept {
    return *staging_;
  }
  /// What replays read; it doesn't change after end().
  const std::vector<Block*>& blocks() const noexcept {
    return blocks_;
  }
  /// Of these; it doesn't change either.
  const std::vector<std::shared_ptr<HeldCopy>>& held() const noexcept {
    return held_;
  }

 private:
  void destroy() noexcept;
  Event recordOn(Stream stream);
  void keep(Block& block);
  Staging::BufferPtr takeUsed(std::size_t bytes);
  void enqueueCopy(void* to, const void* from, std::size_t bytes, const Staging::Buffer& buffer, Stream stream) const;
  void join(Stream stream) noexcept;

  Link& link_;
  EventPool& tokens_;
  const std::shared_ptr<Staging> staging_;
  const std::shared_ptr<HeldCopies> heldCopies_;
  const std::uint64_t id_;
  const Keep keep_;
  const CaptureOptions options_;
  const Stream copies_;
  Event begin_ = nullptr;
  std::mutex mutex_;
  bool ended_ = false;
  std::vector<Staging::BufferPtr> buffers_; // all that replays write to
  std::deque<Staging::BufferPtr> free_; // the oldest first
  std::unordered_map<const Staging::Buffer*, std::vector<Event>> lastUses_; // in this graph; the next copy waits for them
  std::vector<Event> events_;
  std::vector<Block*> blocks_;
  std::unordered_map<const Block*, std::shared_ptr<void>> kept_;
  std::vector<std::shared_ptr<HeldCopy>> held_; // gone before its Blocks are
  std::unordered_set<const HeldCopy*> isHeld_;
};

} // namespace offload
