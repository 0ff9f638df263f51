// What the tests on a real device share. They are skipped where there is none.
#pragma once

#ifdef OFFLOAD_WITH_CUDA
#include <cuda_runtime_api.h>

#include "core/link/cuda_link.h"
#include "core_rig.h"

namespace offload::core_test {

class PlainMemory final : public DeviceMemory {
 public:
  void* allocate(std::size_t bytes, Stream /*stream*/) override {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, bytes), cudaSuccess);
    return data;
  }
  void free(void* device, Stream /*stream*/) noexcept override {
    (void)cudaFree(device);
  }
  MemoryInfo memoryInfo(int /*device*/) override {
    return {};
  }
};

inline bool hasCuda() {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

} // namespace offload::core_test
#endif
