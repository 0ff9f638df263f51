// That the ring, the write buffer and the budget hold no more than they may.
#pragma once

#include "fuzz_program.h"

namespace offload::core_test {

/// After a fetch of so many bytes.
inline void Program::checkAccounts(int device, bool hit, std::size_t bytes) {
  const ResidencyStats stats = rig_.cache.stats(device);
  const std::size_t ring = rig_.cache.ringBytes();
  const double share = options_.cache.evictAtUnpin ? 0 : options_.cache.writeBufferShare;
  const auto writeBuffer = static_cast<std::size_t>(share * static_cast<double>(ring));
  // What the Link would not send home stays Dirty.
  const std::size_t inRing = faulty_ ? 0 : std::min(stats.dirtyBytes, writeBuffer);
  const std::size_t passing = stats.slotBytes - stats.stayingBytes - stats.dirtyBytes + inRing;
  const std::size_t fits = std::max(ring, 2 * (bytes + kAlignment));
  check(hit || passing <= fits + stats.pinnedBytes, "the ring is exceeded by more than what is pinned");
  const std::size_t buffered = std::min(stats.dirtyBytes, std::max(writeBuffer, addendBytes_[device]));
  const std::size_t budgeted = stats.dirtyBytes - buffered + stats.stayingBytes;
  check(
      faulty_ || stats.dirtyBytes == buffered || budgeted <= rig_.cache.budget(device),
      "there is more that is Dirty than the budget and the write buffer allow");
}

} // namespace offload::core_test
