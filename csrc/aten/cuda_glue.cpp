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

namespace {

// PyTorch's own streams are there for good. One that somebody else has made is known to it by its handle, and so by nothing once that
// is another one's.
Stream named(c10::cuda::CUDAStream stream) {
  const auto handle = stream.stream();
  unsigned long long id = 0;
  if (handle != nullptr && stream.id() == reinterpret_cast<c10::StreamId>(handle)) (void)cudaStreamGetId(handle, &id);
  return {stream.device_index(), handle, id};
}

} // namespace

Stream currentStream(c10::DeviceIndex index) {
  return named(c10::cuda::getCurrentCUDAStream(index));
}

Stream streamOf(c10::Stream stream) {
  return named(c10::cuda::CUDAStream(stream));
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
