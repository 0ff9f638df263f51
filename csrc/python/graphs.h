// CUDA graphs with fetches, for the Python class to follow.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

/// Adds the class CapturedGraph(device).
void bindGraphs(pybind11::module_& m);

} // namespace offload
