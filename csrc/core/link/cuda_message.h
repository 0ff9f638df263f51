// What a failed call to CUDA says.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace offload {

struct CudaFailure {
  std::string what; ///< was tried: "copy to the device"
  std::string name; ///< CUDA's: "cudaErrorIllegalAddress"
  std::string meaning; ///< CUDA's: "an illegal memory access was encountered"
  std::optional<int> device = std::nullopt;
  std::optional<std::size_t> bytes = std::nullopt;
};

/// One sentence: what, where, how much, why, what to do.
std::string messageOf(const CudaFailure& failure);

} // namespace offload
