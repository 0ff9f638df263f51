// Device memory that the copies of CUDA graphs go to.
#pragma once

#include "core/token.h"

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace offload {

/// Of one device. Its graphs share what no Pin holds, so that many of them need no more of it than one; their replays follow each
/// other for that. It lives as long as any of its memory.
class Staging : public std::enable_shared_from_this<Staging> {
 public:
  /// One piece. A graph that may write to it keeps it.
  struct Buffer : std::enable_shared_from_this<Buffer> {
    Buffer(std::shared_ptr<Staging> of, void* memory, std::size_t size, bool keeps)
        : staging(std::move(of)), data(memory), bytes(size), held(keeps) {}
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    /// Whether it is large enough for so many, and not a waste.
    bool isFor(std::size_t wanted) const noexcept {
      return bytes >= wanted && bytes <= 2 * wanted + 4096;
    }

    const std::shared_ptr<Staging> staging;
    void* const data;
    const std::size_t bytes;
    const bool held; // by Note [Held copies]: always taken
  };
  using BufferPtr = std::shared_ptr<Buffer>;

  /// Memory is allocated and given back on `home`, which is never captured.
  Staging(Link& link, EventPool& events, Stream home) : link_(link), events_(events), home_(home) {}

  /// What has been allocated; it is taken. The next use on any stream must come behind uses().
  BufferPtr add(void* data, std::size_t bytes, bool held = false);
  /// The smallest piece for so many bytes that nobody has taken, which it is then; null if there is none.
  BufferPtr take(std::size_t bytes);
  void giveBack(Buffer& buffer);

  /// What has to be done before the next replay, or before memory is given back. Asks the Link what is done by now.
  std::vector<Token> uses();
  void addUse(Token token);
  Stream home() const noexcept {
    return home_;
  }
  /// Of all that is not held.
  std::size_t bytes() const;

  /// One replay at a time is launched: from uses() to addUse(). Waits for the others', without the GIL.
  void beginTurn();
  void endTurn();

  /// From now on nothing touches the device: what is left goes with the process.
  void close() noexcept;
  bool closed() const noexcept;

 private:
  struct Memory {
    void* data;
    std::size_t bytes; // that count
  };

  void free(const Buffer& buffer) noexcept;
  void freeRefused() noexcept;

  Link& link_;
  EventPool& events_;
  const Stream home_;
  mutable std::mutex mutex_;
  std::condition_variable turn_;
  bool launching_ = false;
  /// What neither a capture that goes on nor a Pin has taken, by bytes and address.
  std::map<std::pair<std::size_t, void*>, std::weak_ptr<Buffer>> idle_;
  std::vector<Memory> refused_; // to be freed, as soon as that can be ordered after its uses
  std::size_t bytes_ = 0;
  TokenSet uses_;
  bool closed_ = false;
};

} // namespace offload
