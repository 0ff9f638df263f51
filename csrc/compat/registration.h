// What this library registers with PyTorch, held back until the import may register it.
//
// PyTorch's macros register when a library is loaded, and then nothing can be refused any more: over another PrivateUse1 backend they
// replace its guard, or end the process. So the blocks of these macros only enter a list, and registerAll() goes through it.
#pragma once

#include <torch/library.h>

namespace offload::compat {

class Registration {
 public:
  using Fill = void (*)(torch::Library&);
  Registration(
      torch::Library::Kind kind, const char* space, std::optional<c10::DispatchKey> key, Fill fill, const char* file, int line);
  /// For what is no kernel; runs after all kernels are registered.
  explicit Registration(void (*run)());
};

/// All or nothing: where one throws, what is registered already is taken back.
void registerAll();

} // namespace offload::compat

#define OFFLOAD_REGISTER_(kind, space, key, m, unique)                                               \
  static void C10_CONCATENATE(fillLibrary, unique)(torch::Library&);                                 \
  static const ::offload::compat::Registration C10_CONCATENATE(libraryEntry, unique)(                \
      torch::Library::kind, #space, key, &C10_CONCATENATE(fillLibrary, unique), __FILE__, __LINE__); \
  void C10_CONCATENATE(fillLibrary, unique)(torch::Library & (m))

/// As TORCH_LIBRARY and TORCH_LIBRARY_IMPL.
#define OFFLOAD_LIBRARY(space, m) OFFLOAD_REGISTER_(DEF, space, std::nullopt, m, __COUNTER__)
#define OFFLOAD_LIBRARY_IMPL(space, key, m) OFFLOAD_REGISTER_(IMPL, space, c10::DispatchKey::key, m, __COUNTER__)
