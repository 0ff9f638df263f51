// Elementwise programs, as Python writes them.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

/// Adds the class ElementwiseProgram(operands, temporaries, steps) to the module: how many operands, the temporaries' dtypes, and
/// (name, overload, arguments) with every argument of the schema, each a number, a bool, None, a 0-dim CPU tensor, or `Register(n)`.
void bindElementwise(pybind11::module_& m);

} // namespace offload
