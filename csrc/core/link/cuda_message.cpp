#include "core/link/cuda_message.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace offload {
namespace {

// After these every call of the process fails, as CUDA's documentation has it.
constexpr std::array<std::string_view, 14> kLasting{
    "cudaErrorIllegalAddress",      "cudaErrorLaunchTimeout",      "cudaErrorAssert",
    "cudaErrorHardwareStackError",  "cudaErrorIllegalInstruction", "cudaErrorMisalignedAddress",
    "cudaErrorInvalidAddressSpace", "cudaErrorInvalidPc",          "cudaErrorLaunchFailure",
    "cudaErrorTensorMemoryLeak",    "cudaErrorECCUncorrectable",   "cudaErrorNvlinkUncorrectable",
    "cudaErrorContained",           "cudaErrorMpsClientTerminated"};

bool lasts(std::string_view name) {
  return std::find(kLasting.begin(), kLasting.end(), name) != kLasting.end();
}

} // namespace

std::string messageOf(const CudaFailure& failure) {
  std::string text = "offload: CUDA failed to " + failure.what;
  if (failure.bytes) text += " (" + std::to_string(*failure.bytes) + " bytes)";
  if (failure.device) text += " on cuda:" + std::to_string(*failure.device);
  text += ": " + failure.meaning + " (" + failure.name + "); ";
  if (lasts(failure.name)) {
    text +=
        "every call to CUDA fails now, so the process must be restarted; an operation enqueued earlier may be to blame, and "
        "CUDA_LAUNCH_BLOCKING=1 finds out which.";
  } else if (failure.name == "cudaErrorMemoryAllocation") {
    text += "make room on the GPU, with torch_offload.set_budget(), torch_offload.set_ring_bytes() or a smaller batch.";
  } else if (failure.name == "cudaErrorNoDevice" || failure.name == "cudaErrorInsufficientDriver") {
    text += "install a driver for this CUDA, or set TORCH_OFFLOAD_LINK=none to compute on the CPU.";
  } else if (failure.name.starts_with("cudaErrorStreamCapture")) {
    text += "use offload tensors outside of the capture of a CUDA graph.";
  } else {
    text += "that call had no effect and may be repeated; where it fails again, report it with these numbers.";
  }
  return text;
}

} // namespace offload
