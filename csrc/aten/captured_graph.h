// The fetches of one CUDA graph of PyTorch's: Note [Captured fetches].
#pragma once

#include "aten/context.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace offload {

/// Follows one torch.cuda.CUDAGraph of a device.
class CapturedGraph {
 public:
  /// Of the capture that has just begun on the device's current stream.
  explicit CapturedGraph(c10::DeviceIndex device);

  /// Called when the capture has ended, or failed to.
  void end();
  /// How many tensors' memory its replays read; the number that a graph without offload tensors has is 0.
  std::size_t tensors() const;

  /// Lives while a replay is launched on the current stream.
  class Replay {
   public:
    explicit Replay(const CapturedGraph& graph);
    ~Replay();
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;

   private:
    const CapturedFetches& fetches_;
    const Stream stream_;
  };

 private:
  const c10::DeviceIndex device_;
  const std::shared_ptr<CapturedFetches> fetches_;
};

/// Whether a graph may fetch a tensor while it is captured, and the tensor begins at a multiple of `alignment`. One that is not on
/// offload is nothing to fetch. The answer for a storage's memory never changes.
bool canBeCaptured(const at::Tensor& tensor, std::uintptr_t alignment);

/// Throws where a graph is being captured on the current stream of the device `index`: nothing on the host is part of one.
void refuseHostAccessInCapture(c10::DeviceIndex index);

} // namespace offload
