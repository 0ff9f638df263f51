// Host work in an order that tokens give.
#pragma once

#include "core/link/owned_stream.h"
#include "core/token.h"

#include <span>

namespace offload {

/// Tasks run one after the other, in the order in which they were submitted. A copy can wait for a task and a task for a copy: both
/// are places on streams. What a task may do is in Note [Host tasks]; above all it must not throw. Threads may submit at once.
class Executor {
 public:
  Executor(Link& link, EventPool& events, int device) : link_(link), events_(events), stream_(link, device) {}

  /// Runs `task` after all of `after`; the token says that it has returned. Never waits. If it throws, `task` is not run.
  Token submit(HostTask task, std::span<const Token> after);

  Stream stream() const noexcept {
    return stream_.get();
  }

 private:
  Link& link_;
  EventPool& events_;
  const OwnedStream stream_;
};

} // namespace offload
