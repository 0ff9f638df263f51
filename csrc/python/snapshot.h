// The host memory of offload tensors, as PyTorch's memory visualizer reads it.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

/// The dictionary of torch.cuda.memory._snapshot(): "segments" and "device_traces". Before the first use of offload memory both are
/// empty.
pybind11::dict takeSnapshot();

} // namespace offload
