// The loops of Note [Vector kernels]. Compiled once for each set of instructions, which OFFLOAD_VECTOR_SET names, and with no
// template or inline function from elsewhere: the linker could give the rest of the library the copy made here.
#include "aten/vector/kernels.h"

namespace offload::OFFLOAD_VECTOR_SET {
namespace {

struct BFloat16 {
  std::uint16_t bits;
};

inline float valueOf(float stored) {
  return stored;
}
inline double valueOf(double stored) {
  return stored;
}
inline float valueOf(BFloat16 stored) {
  return __builtin_bit_cast(float, std::uint32_t{stored.bits} << 16);
}

inline void store(float& place, float value) {
  place = value;
}
inline void store(double& place, double value) {
  place = value;
}
// To the nearest, and of two to the even one.
inline void store(BFloat16& place, float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  place.bits = static_cast<std::uint16_t>(value == value ? rounded : 0x7fc0);
}

inline float fusedMultiplyAdd(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline double fusedMultiplyAdd(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
inline float squareRoot(float a) {
  return __builtin_sqrtf(a);
}
inline double squareRoot(double a) {
  return __builtin_sqrt(a);
}

template <VectorOp op, class Value>
inline Value compute(Value a, Value b, Value c, Value number) {
  if constexpr (op == VectorOp::AddScaled) return fusedMultiplyAdd(b, number, a);
  if constexpr (op == VectorOp::AddNumber) return a + number;
  if constexpr (op == VectorOp::Multiply) return a * b;
  if constexpr (op == VectorOp::MultiplyBy) return a * number;
  if constexpr (op == VectorOp::Divide) return a / b;
  if constexpr (op == VectorOp::DivideBy) return a / number;
  if constexpr (op == VectorOp::AddProduct) return fusedMultiplyAdd(number * b, c, a);
  if constexpr (op == VectorOp::AddQuotient) return a + number * b / c;
  if constexpr (op == VectorOp::SquareRoot) return squareRoot(a);
  if constexpr (op == VectorOp::Negative) return -a;
  // From the end that is nearer.
  if constexpr (op == VectorOp::Lerp) {
    const bool near = number < Value{0.5} && number > Value{-0.5};
    return near ? fusedMultiplyAdd(number, b - a, a) : fusedMultiplyAdd(b - a, number - 1, b);
  }
}

constexpr int arraysOf(VectorOp op) {
  switch (op) {
    case VectorOp::AddNumber:
    case VectorOp::MultiplyBy:
    case VectorOp::DivideBy:
    case VectorOp::SquareRoot:
    case VectorOp::Negative:
      return 1;
    case VectorOp::AddProduct:
    case VectorOp::AddQuotient:
      return 3;
    default:
      return 2;
  }
}

// What is added is rounded like what it is added to; factors are not.
template <VectorOp op, class Stored, class Value>
inline Value numberOf(Value number) {
  if constexpr (op != VectorOp::AddScaled && op != VectorOp::AddNumber) return number;
  Stored rounded;
  store(rounded, number);
  return valueOf(rounded);
}

template <VectorOp op, class Stored>
void loop(void* out, const void* a, const void* b, const void* c, double number, std::size_t count) {
  using Value = decltype(valueOf(Stored{}));
  auto* const to = static_cast<Stored*>(out);
  const auto* const first = static_cast<const Stored*>(a);
  const auto* const second = arraysOf(op) > 1 ? static_cast<const Stored*>(b) : first;
  const auto* const third = arraysOf(op) > 2 ? static_cast<const Stored*>(c) : first;
  const auto s = numberOf<op, Stored>(static_cast<Value>(number));
  // An element is written after it is read, and meets no other.
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (std::size_t k = 0; k < count; ++k) {
    store(to[k], compute<op, Value>(valueOf(first[k]), valueOf(second[k]), valueOf(third[k]), s));
  }
}

template <VectorOp op>
VectorKernel ofType(VectorType type) {
  switch (type) {
    case VectorType::Float:
      return loop<op, float>;
    case VectorType::Double:
      return loop<op, double>;
    case VectorType::BFloat16:
      return loop<op, BFloat16>;
  }
  return nullptr;
}

} // namespace

VectorKernel kernel(VectorOp op, VectorType type) {
  switch (op) {
    case VectorOp::AddScaled:
      return ofType<VectorOp::AddScaled>(type);
    case VectorOp::AddNumber:
      return ofType<VectorOp::AddNumber>(type);
    case VectorOp::Multiply:
      return ofType<VectorOp::Multiply>(type);
    case VectorOp::MultiplyBy:
      return ofType<VectorOp::MultiplyBy>(type);
    case VectorOp::Divide:
      return ofType<VectorOp::Divide>(type);
    case VectorOp::DivideBy:
      return ofType<VectorOp::DivideBy>(type);
    case VectorOp::Lerp:
      return ofType<VectorOp::Lerp>(type);
    case VectorOp::AddProduct:
      return ofType<VectorOp::AddProduct>(type);
    case VectorOp::AddQuotient:
      return ofType<VectorOp::AddQuotient>(type);
    case VectorOp::SquareRoot:
      return ofType<VectorOp::SquareRoot>(type);
    case VectorOp::Negative:
      return ofType<VectorOp::Negative>(type);
  }
  return nullptr;
}

} // namespace offload::OFFLOAD_VECTOR_SET
