// Requests that the driver refuses to PyTorch's CUDA allocator.
#pragma once

#include <cstddef>

namespace offload::compat {

/// Note [Refused memory]
/// The allocator calls its FreeMemoryCallbacks before it asks the driver, without the size, and its observers when all is lost. In
/// between, when cudaMalloc has refused, it returns what it keeps unused to the driver and asks once more. So its calls of cudaMalloc go
/// by a function of ours (see Note [Import slots]), which passes them on: what is given to the allocator there, it gives to the driver
/// before that second attempt. Not seen are requests beyond set_per_process_memory_fraction(), for which it doesn't ask the driver, and
/// those of expandable segments, which it makes by other functions.
///
/// Has `told` called with the bytes of each such request, on its thread, with its device current and the allocator's lock held: it must
/// not throw or take the GIL. False where libc10_cuda has no import slot of cudaMalloc, or one that can't be written: the allocator stays
/// as it was. To be called once.
bool tellOfRefusedMemory(void (*told)(std::size_t bytes));

} // namespace offload::compat
