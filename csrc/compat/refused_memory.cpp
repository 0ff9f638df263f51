#include "compat/refused_memory.h"

#ifdef OFFLOAD_WITH_CUDA
#include "compat/import_slots.h"

#include <cuda_runtime_api.h>

namespace offload::compat {
namespace {

using Malloc = cudaError_t (*)(void**, std::size_t);

Malloc mallocBefore = nullptr;
void (*toldOfRefusals)(std::size_t) = nullptr;

cudaError_t mallocAndTell(void** data, std::size_t bytes) {
  const cudaError_t error = mallocBefore(data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError(); // or whoever asks next takes it for his own
    toldOfRefusals(bytes);
  }
  return error;
}

} // namespace

bool tellOfRefusedMemory(void (*told)(std::size_t bytes)) {
  const auto slots =
      findImportSlots("cudaMalloc", [](std::string_view library) { return library.starts_with("libc10_cuda.so"); });
  toldOfRefusals = told;
  for (const auto& slot : slots) {
    mallocBefore = reinterpret_cast<Malloc>(*slot.address);
    redirect(slot, reinterpret_cast<void*>(&mallocAndTell));
  }
  return !slots.empty();
}

} // namespace offload::compat

#endif
