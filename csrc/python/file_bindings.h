// Files and tensors from them, for torch_offload/io.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

void bindFiles(pybind11::module_& m);

} // namespace offload
