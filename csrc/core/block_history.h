// The latest Blocks that came and went.
#pragma once

#include "core/block.h"

#include <chrono>
#include <deque>

namespace offload {

struct BlockEvent {
  const void* data = nullptr;
  std::size_t bytes = 0;
  bool gone = false;
  /// At that time; a Block that has come may be claimed for more later.
  Purpose purpose = Purpose::Temporary;
  std::chrono::system_clock::time_point time;
};

/// Off until it is given room. When that is used up, the oldest event goes for the newest. Guarded by HostAccounts.
class BlockHistory {
 public:
  /// Forgets all events, and keeps `most` from now on; 0: none.
  void restart(std::size_t most);
  /// Keeps the events there are, and adds none.
  void stop() noexcept {
    most_ = 0;
  }
  /// Only of memory of the Arena's: others account for theirs.
  void add(const Block& block, bool gone);
  const std::deque<BlockEvent>& events() const noexcept {
    return events_;
  }

 private:
  std::size_t most_ = 0;
  std::deque<BlockEvent> events_;
};

} // namespace offload
