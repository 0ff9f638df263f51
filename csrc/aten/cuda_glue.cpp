#include "aten/cuda_glue.h"

#include "core/error.h"

#ifdef OFFLOAD_WITH_CUDA
#include "core/link/cuda_link.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace offload::cuda {

#ifdef OFFLOAD_WITH_CUDA
namespace {

class CachingMemory final : public DeviceMemory {
 public:
  void* allocate(std::size_t bytes, Stream stream) override {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(stream.device));
    try {
      return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream.handle));
    } catch (const c10::OutOfMemoryError& error) {
      throw OutOfMemory(OutOfMemory::Where::Device, bytes, error.what_without_backtrace());
    }
  }

  void free(void* device, Stream /*stream*/) noexcept override {
    c10::cuda::CUDACachingAllocator::raw_delete(device);
  }
};

} // namespace

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

std::unique_ptr<Link> makeLink() {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return makeCudaLink(std::make_unique<CachingMemory>());
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

std::unique_ptr<Link> makeLink() {
  throw Error("offload: this build has no CUDA support; install a CUDA build of torch and build torch_offload again.");
}

#endif

} // namespace offload::cuda
