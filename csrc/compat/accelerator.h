// Keeps PyTorch's accelerator what it was before a PrivateUse1 backend was registered.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace offload::compat {

/// Why the device can't be registered, in one sentence that says what to do. Nothing has changed.
class ImportRefused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws ImportRefused where another PrivateUse1 backend has registered anything.
void checkAlone();

/// The mangled names of the two functions.
struct AcceleratorSymbols {
  std::string get = "_ZN2at11accelerator14getAcceleratorEb";
  std::string is = "_ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE";
};

/// Makes PyTorch answer as if PrivateUse1 were no accelerator, then calls `then`, which registers the backend; see Note [A memory,
/// not an accelerator]. Touches nothing of PyTorch with TORCH_OFFLOAD_ACCELERATOR=keep in the environment. To be called with the
/// GIL, before the backend's name is registered. Throws ImportRefused where PyTorch's answers would stay wrong; where it throws, or
/// `then` does, PyTorch answers as before.
void correctAccelerator(const AcceleratorSymbols& symbols, const std::function<void()>& then);

/// Whether PyTorch takes the offload device for its accelerator.
bool isAccelerator();

} // namespace offload::compat
