#include "aten/cuda_glue.h"

#ifdef OFFLOAD_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace offload::cuda {

#ifdef OFFLOAD_WITH_CUDA
c10::DeviceIndex deviceCount() noexcept {
  return c10::cuda::device_count();
}

std::size_t totalMemory() {
  return at::cuda::getDeviceProperties(0)->totalGlobalMem;
}

Stream currentStream(c10::DeviceIndex index) {
  return {index, c10::cuda::getCurrentCUDAStream(index).stream()};
}

Stream streamOf(c10::Stream stream) {
  return {stream.device_index(), c10::cuda::CUDAStream(stream).stream()};
}

BesideCaptures::BesideCaptures() noexcept {
  auto mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  previous_ = mode;
}

BesideCaptures::~BesideCaptures() {
  auto mode = static_cast<cudaStreamCaptureMode>(previous_);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

#else

c10::DeviceIndex deviceCount() noexcept {
  return 0;
}

std::size_t totalMemory() {
  return 0;
}

Stream currentStream(c10::DeviceIndex index) {
  return {index, nullptr};
}

Stream streamOf(c10::Stream stream) {
  return {stream.device_index(), nullptr};
}

BesideCaptures::BesideCaptures() noexcept = default;
BesideCaptures::~BesideCaptures() = default;

#endif

} // namespace offload::cuda
