// Copies of host bytes that CUDA graphs keep on the device from replay to replay.
//
// Note [Held copies]
// Not every replay has to copy what there is room for. Such bytes have memory of their own, which all graphs of the device read, and
// which is as new as the host's when one of them is replayed: what was written since the last time is copied then, ahead of it. Its
// address is part of the graphs, so nobody can ask it back while there are any; it counts as part of the budget, of which it has no
// more than half when a capture begins.
#pragma once

#include "core/block.h"
#include "core/staging.h"

#include <functional>
#include <map>
#include <optional>
#include <tuple>

namespace offload {

struct HeldCopy {
  Block& block; // which whoever has this keeps
  const Extent extent;
  const Staging::BufferPtr buffer;
  std::byte* const data; // where the extent begins within the buffer
  /// Of the Block, when its bytes were copied last; guarded by Staging's turn.
  std::optional<std::uint64_t> version{};
};

/// Those of one device.
class HeldCopies {
 public:
  explicit HeldCopies(std::shared_ptr<Staging> staging) : staging_(std::move(staging)) {}

  /// The one of these bytes. Where there is none it is made, of memory that `allocate` gives, under no lock; null where that has
  /// none, or all of them would then have more than `most` bytes. It must not outlive this.
  std::shared_ptr<HeldCopy> get(
      Block& block, Extent extent, std::size_t most, const std::function<void*(std::size_t)>& allocate);
  /// Of all.
  std::size_t bytes() const;

 private:
  using Key = std::tuple<const Block*, std::size_t, std::size_t>;

  void destroy(HeldCopy* copy) noexcept;

  const std::shared_ptr<Staging> staging_;
  mutable std::mutex mutex_;
  std::map<Key, std::weak_ptr<HeldCopy>> known_;
  std::size_t bytes_ = 0; // of all known
};

} // namespace offload
