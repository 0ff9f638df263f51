#include "core/block_history.h"

namespace offload {

void BlockHistory::restart(std::size_t most) {
  most_ = most;
  events_.clear();
}

void BlockHistory::add(const Block& block, bool gone) {
  if (most_ == 0 || block.kind == BlockKind::Foreign) return;
  if (events_.size() == most_) events_.pop_front();
  events_.push_back({block.data, block.bytes, gone, block.purpose, std::chrono::system_clock::now()});
}

} // namespace offload
