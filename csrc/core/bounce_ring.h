// Page-locked chunks through which pageable memory is copied.
//
// Note [Bounce ring]
// CUDA makes the thread that copies pageable memory wait, for all that is ahead on the stream too. So a host task moves the bytes
// between there and a chunk, and the copy stream between the chunk and the device. Whoever takes a chunk has it alone while he
// enqueues its uses, and orders the first of them after the last one of before, which the chunk's token names. That holds for
// any number of threads and without a lock across their calls. Nobody waits for a chunk: the one in use longest ago is next, where
// other threads have all of them in hand there will be more, and where the system refuses those a copy goes on with the one it has.
#pragma once

#include "core/token.h"

#include <cstddef>

namespace offload {

class BounceRing {
 public:
  static constexpr std::size_t kChunks = 4;

  struct Chunk {
    std::byte* data = nullptr;
    /// Implies all that has been done with the chunk; kept by whoever has it.
    Token lastUse;
  };
  struct GiveBack {
    BounceRing* ring;
    void operator()(Chunk* chunk) const noexcept {
      ring->giveBack(chunk);
    }
  };
  using Taken = std::unique_ptr<Chunk, GiveBack>;

  enum class Locking {
    Required, // chunks are page-locked, or there are none
    Preferred, // whoever copies has no other memory to copy from
  };

  /// Takes memory from the system when it is first needed, `kChunks` at a time, and keeps it until it is trimmed.
  BounceRing(Link& link, std::size_t chunkBytes, Locking locking = Locking::Required);
  /// Waits for the last uses. Nobody may have a chunk.
  ~BounceRing();
  BounceRing(const BounceRing&) = delete;
  BounceRing& operator=(const BounceRing&) = delete;

  std::size_t chunkBytes() const noexcept {
    return chunkBytes_;
  }
  /// Host memory that it has, page-locked where the system permits. No limit of the Arena's counts it.
  std::size_t bytes() const;
  /// Null where no page-locked memory is to be had, or none is wanted; where that is not required, only if the system has no
  /// memory at all. Never waits.
  Taken take();
  /// Gives a chunk back for the one in use longest ago, or keeps it where there is no other.
  void exchange(Taken& chunk);
  /// Returns to the system what nobody has a chunk of, after waiting for its last uses. The next copy takes memory again.
  void trim();

 private:
  struct Region;

  void giveBack(Chunk* chunk) noexcept;
  Chunk* oldest();
  bool mayHave() const;
  std::unique_ptr<Region> newRegion();

  Link& link_;
  const std::size_t chunkBytes_;
  const Locking locking_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Region>> regions_;
  std::vector<Chunk*> idle_; // the one given back first in front
  /// The system is not asked again for page-locked memory once it has refused: each time would cost milliseconds.
  bool refused_;
};

} // namespace offload
