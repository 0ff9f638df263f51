#include "aten/vector/kernels.h"

#include "aten/vector/loops.h"

namespace offload {
namespace {

using Set = VectorKernel (*)(VectorOp, VectorType);

Set bestSet() {
#if OFFLOAD_VECTOR_SETS
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return nullptr;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return wide ? avx512::kernel : avx2::kernel;
#else
  return nullptr;
#endif
}

} // namespace

VectorKernel vectorKernel(VectorOp op, VectorType type) {
  static const Set set = bestSet();
  return set == nullptr ? nullptr : set(op, type);
}

} // namespace offload
