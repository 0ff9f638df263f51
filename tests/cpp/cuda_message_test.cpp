// What a failed call to CUDA says; no GPU is needed.
#include "core/link/cuda_message.h"

#include <gtest/gtest.h>

namespace offload {
namespace {

TEST(CudaMessage, NamesCallBytesAndDevice) {
  EXPECT_EQ(
      messageOf({"copy to the device", "cudaErrorInvalidValue", "invalid argument", 1, 4096}),
      "offload: CUDA failed to copy to the device (4096 bytes) on cuda:1: invalid argument (cudaErrorInvalidValue); that call "
      "had no effect and may be repeated; where it fails again, report it with these numbers.");
}

TEST(CudaMessage, AProcessThatLostItsDeviceMustRestart) {
  EXPECT_EQ(
      messageOf({"wait for a copy", "cudaErrorIllegalAddress", "an illegal memory access was encountered"}),
      "offload: CUDA failed to wait for a copy: an illegal memory access was encountered (cudaErrorIllegalAddress); every call "
      "to CUDA fails now, so the process must be restarted; an operation enqueued earlier may be to blame, and "
      "CUDA_LAUNCH_BLOCKING=1 finds out which.");
}

TEST(CudaMessage, OutOfMemorySaysHowToMakeRoom) {
  EXPECT_EQ(
      messageOf({"create a stream", "cudaErrorMemoryAllocation", "out of memory", 0}),
      "offload: CUDA failed to create a stream on cuda:0: out of memory (cudaErrorMemoryAllocation); make room on the GPU, "
      "with "
      "torch_offload.set_budget(), torch_offload.set_ring_bytes() or a smaller batch.");
}

TEST(CudaMessage, WithoutADriver) {
  EXPECT_EQ(
      messageOf({"count the devices", "cudaErrorNoDevice", "no CUDA-capable device is detected"}),
      "offload: CUDA failed to count the devices: no CUDA-capable device is detected (cudaErrorNoDevice); install a driver for "
      "this CUDA, or set TORCH_OFFLOAD_LINK=none to compute on the CPU.");
}

TEST(CudaMessage, InACapture) {
  EXPECT_EQ(
      messageOf(
          {"copy to the host", "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing", 0, 8}),
      "offload: CUDA failed to copy to the host (8 bytes) on cuda:0: operation not permitted when stream is capturing "
      "(cudaErrorStreamCaptureUnsupported); use offload tensors outside of the capture of a CUDA graph.");
}

} // namespace
} // namespace offload
