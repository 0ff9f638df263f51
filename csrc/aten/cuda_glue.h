// All that the glue needs of PyTorch's CUDA side. Built without CUDA, it answers that there is none.
#pragma once

#include "core/link/link.h"

#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

namespace offload::cuda {

/// CUDA devices that PyTorch sees; creates no CUDA context.
c10::DeviceIndex deviceCount() noexcept;
/// Bytes of the first device.
std::size_t totalMemory();
/// PyTorch's current stream of a device, for the calling thread.
Stream currentStream(c10::DeviceIndex index);
/// A stream of PyTorch's.
Stream streamOf(c10::Stream stream);
/// Residency::relieve(), called with the allocator's lock held.
using Relieve =
    std::size_t (*)(c10::DeviceIndex index, std::size_t free, std::size_t usual, std::size_t most, std::size_t kept);
/// Residency::relieveOf(), likewise.
using RelieveOf = std::size_t (*)(c10::DeviceIndex index, std::size_t bytes);
/// Gives up all that can be, after a request has failed. Must not throw.
using GiveUp = void (*)(c10::DeviceIndex index);
/// Has PyTorch's allocator ask when it has no block for a request, and tell when the driver has refused one, and when it has failed. To be
/// called once.
void relieveAllocatorBy(Relieve relieve, RelieveOf relieveOf, GiveUp giveUp);
/// Tells whether PyTorch's allocator serves the calling thread from a pool; the cache's memory then comes from beside it.
void setThreadHasPool(bool has) noexcept;
/// Gives what PyTorch's allocator keeps and nobody uses back to the driver; not while the calling thread captures a graph.
void releaseCached();
/// While it lives, what its thread asks of events spoils no graph that another thread captures.
class BesideCaptures {
 public:
  BesideCaptures() noexcept;
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  int previous_ = 0;
};
/// The Link over PyTorch's CUDA caching allocator.
std::unique_ptr<Link> makeLink();

} // namespace offload::cuda
