// Storages whose bytes several processes use.
#pragma once

#include "aten/context.h"

namespace offload {

/// Whether other processes may use a storage's bytes. One without bytes has none that they can't.
bool isShared(const c10::StorageImpl& storage);

/// Moves the bytes of a storage to memory that other processes can open; nothing where they are there already. Tensors of the
/// storage keep it; its address is another then. Whoever uses it meanwhile on another thread has a data race, as with a CPU tensor.
void share(c10::StorageImpl& storage);

/// The descriptor by which another process opens the bytes of a shared storage; it stays the storage's own.
int sharedDescriptor(const c10::StorageImpl& storage);

/// The storage that another process has shared, on the device `offload:index`. Takes the descriptor.
c10::Storage openShared(int descriptor, c10::DeviceIndex index);

} // namespace offload
