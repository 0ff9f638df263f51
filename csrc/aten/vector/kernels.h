// Elementwise operations on arrays, by what this processor has of vector instructions.
//
// Note [Vector kernels]
// Each is a loop that the compiler makes vector instructions of, compiled once for each set of these. An element is computed by
// itself and every operation is rounded as it is written here (the compiler contracts nothing), so bits depend neither on the set
// nor on where an array is cut. Values of 16 bits are computed in float and rounded when they are stored, as PyTorch does.
// This file knows nothing of PyTorch: whether PyTorch's own kernels round like these is seen by who calls, VectorProgram.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

enum class VectorType : std::uint8_t { Float, Double, BFloat16 };

/// Of up to three arrays a, b, c and a number s.
enum class VectorOp : std::uint8_t {
  AddScaled, // a + s b
  AddNumber, // a + s
  Multiply, // a b
  MultiplyBy, // s a
  Divide, // a / b
  DivideBy, // a / s
  Lerp, // from a to b by s
  AddProduct, // a + s b c
  AddQuotient, // a + s b / c
  SquareRoot,
  Negative,
};

/// Writes `count` elements to `out`, which may be one of the arrays; otherwise none of them overlap. Arrays that the operation does
/// not have are not read.
using VectorKernel = void (*)(void* out, const void* a, const void* b, const void* c, double number, std::size_t count);

/// Null where this processor has none of the sets that there are kernels for.
VectorKernel vectorKernel(VectorOp op, VectorType type);

} // namespace offload
