// Completion tokens: what still reads or writes some bytes.
#pragma once

#include "core/link/link.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace offload {

/// Done when a point of a stream has been reached. Cheap to copy; a default one is done.
class Token {
 public:
  Token() = default;

  /// Asks the Link; not under a lock.
  bool done() const;
  /// What done() or wait() found out earlier, without asking anybody.
  bool knownDone() const noexcept;
  /// Blocks the host until done.
  void wait() const;
  /// Whether it is a point of this stream: what is enqueued there later runs after it without more ado.
  bool isOn(Stream stream) const noexcept;
  /// Whether later work on `stream` runs after this without more ado, as far as is known: this is done, or on that stream, or it waits
  /// for this already, or for what came later where this did.
  bool isBefore(Stream stream) const noexcept;
  /// Makes later work on `stream` run after this. Never blocks.
  void orderBefore(Stream stream) const;
  /// Whether `later` was recorded on the same stream after this one, so that it being done tells that this one is.
  bool impliedBy(const Token& later) const noexcept;

 private:
  friend class EventPool;
  friend class TokenSet;
  struct Record;
  explicit Token(std::shared_ptr<Record> record) : record_(std::move(record)) {}
  std::shared_ptr<Record> record_;
};

/// Records tokens on streams and reuses their events.
class EventPool {
 public:
  /// `link` must outlive every token.
  explicit EventPool(Link& link);
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  /// Never throws for the Link's sake: a token that it refuses to record now is recorded, or throws, when it is first asked.
  Token record(Stream stream);
  /// A token whose place on the stream is where it is first asked. No Link call.
  Token defer(Stream stream);

 private:
  friend struct Token::Record;
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::mutex deferredMutex_;
  std::vector<Token> deferred_; // that nobody has asked for yet, one for each stream at most
};

/// What reads, or what writes, some bytes at present. Guarded by whoever owns it.
class TokenSet {
 public:
  /// Takes the place of the tokens that it implies: a set holds a few tokens for each stream, however often it is added to.
  void add(Token token);
  void add(const TokenSet& others);
  /// Forgets tokens that are known to be done.
  void prune();
  const std::vector<Token>& all() const noexcept {
    return tokens_;
  }
  void appendTo(std::vector<Token>& out) const;
  std::vector<Token> take() noexcept;
  /// Blocks the host until all are done.
  void wait() const;
  bool empty() const noexcept {
    return tokens_.empty();
  }
  /// Whether no token is implied by one that was added later.
  bool isOrdered() const noexcept;

 private:
  std::vector<Token> tokens_;
};

} // namespace offload
