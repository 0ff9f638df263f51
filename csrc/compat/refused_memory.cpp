#include "compat/refused_memory.h"

#ifdef OFFLOAD_WITH_CUDA
#include "compat/import_slots.h"

#include <cuda_runtime_api.h>

#include <system_error>

namespace offload::compat {
namespace {

void (*toldOfRefusals)(std::size_t) = nullptr;

cudaError_t mallocAndTell(void** data, std::size_t bytes) {
  const cudaError_t error = cudaMalloc(data, bytes); // not what the slot held: see Note [Import slots]
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError(); // or whoever asks next takes it for his own
    toldOfRefusals(bytes);
  }
  return error;
}

} // namespace

bool tellOfRefusedMemory(void (*told)(std::size_t bytes)) {
  toldOfRefusals = told;
  const auto slots =
      findImportSlots("cudaMalloc", [](std::string_view library) { return library.starts_with("libc10_cuda.so"); });
  try {
    for (const auto& slot : slots) redirect(slot, reinterpret_cast<void*>(&mallocAndTell));
  } catch (const std::system_error&) { // as where a security policy forbids it
    return false;
  }
  return !slots.empty();
}

} // namespace offload::compat

#endif
