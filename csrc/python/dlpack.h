// DLPack, which has no such device.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

/// Throws BufferError where a tensor is an offload tensor: who asks one for its memory is told to copy it.
void refuseDlpack(pybind11::handle tensor);

/// PyTorch's table of C functions for DLPack, in its capsule, whose exports refuse offload tensors. Throws RuntimeError where it is of a
/// major version that isn't known.
pybind11::object guardedDlpackTable(const pybind11::capsule& table);

} // namespace offload
