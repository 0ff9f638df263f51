// The PyTorch releases that this library can be built for, and the one that it was built for.
//
// PyTorch's C++ ABI holds within a minor version only, and what csrc/compat corrects is tried release by release. Whether the
// running torch is in the range is asked in torch_offload/_version_check.py, before this library is loaded.
#pragma once

#include <torch/version.h>

#include <string>
#include <string_view>

namespace offload::compat {

inline constexpr int kTorchMajor = 2;
inline constexpr int kOldestTorchMinor = 11;
inline constexpr int kNewestTorchMinor = 15;

static_assert(
    TORCH_VERSION_MAJOR == kTorchMajor && TORCH_VERSION_MINOR >= kOldestTorchMinor && TORCH_VERSION_MINOR <= kNewestTorchMinor,
    "torch_offload can be built for torch 2.11 to 2.15; install one of those in the build environment");

/// Why this build can't run under the torch with version `running` ("2.11.0+cu130"), as one sentence, or "" if it can.
inline std::string unsupportedTorch(std::string_view running) {
  const auto builtFor = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);
  if (running.starts_with(builtFor + ".")) return "";
  return "torch_offload was built for torch " + builtFor + " and found torch " + std::string(running) + "; install torch " +
      builtFor + ", or build torch_offload again under this torch.";
}

} // namespace offload::compat
