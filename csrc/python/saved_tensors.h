// The hooks that keep saved tensors in host memory, for PyTorch to call.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

void bindSavedTensors(pybind11::module_& m);

} // namespace offload
