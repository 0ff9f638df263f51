// What Python knows about the purpose of host bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace offload {

/// Raises the purpose of the offload tensors in a nest of dicts, lists and tuples, and of those inside tensor subclasses. Others are
/// left alone, whatever they are. `purpose` is a nameOf().
void claimTensors(pybind11::handle tensors, const std::string& purpose);

} // namespace offload
