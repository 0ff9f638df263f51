#include "aten/sharing.h"

#include "aten/tensors.h"
#include "core/error.h"
#include "core/host_copy.h"

#include <unistd.h>

namespace offload {
namespace {

std::shared_ptr<SharedMemory> newMemory(std::size_t bytes, Born born) {
  try {
    return Context::get().arena().share(bytes, born);
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
}

} // namespace

bool isShared(const c10::StorageImpl& storage) {
  return storage.nbytes() == 0 || blockOf(storage).shared;
}

void share(c10::StorageImpl& storage) {
  if (isShared(storage)) return;
  Context& context = Context::get();
  Block& old = blockOf(storage);
  const Born born = old.born == Born::Device ? Born::Device : Born::Host; // which no process is to decide for the others
  c10::DataPtr data = context.sharedBlock(newMemory(storage.nbytes(), born), storage.device().index(), old.purpose);
  {
    HostLease from = context.lease(old, Access::Read);
    copyHost(data.get(), storage.data(), storage.nbytes()); // which nobody else knows of yet
  }
  storage.set_data_ptr_noswap(std::move(data));
}

int sharedDescriptor(const c10::StorageImpl& storage) {
  TORCH_CHECK(
      storage.nbytes() > 0 && isShared(storage), "offload: a storage of ", storage.nbytes(),
      " bytes is not shared between processes; call share_memory_() on its tensor first.");
  return blockOf(storage).shared->descriptor();
}

c10::Storage openShared(int descriptor, c10::DeviceIndex index) {
  Context* context = nullptr;
  try {
    context = &Context::get();
    withIndex({kOffload, index});
  } catch (...) {
    close(descriptor);
    throw;
  }
  auto memory = context->arena().openShared(descriptor);
  const std::size_t bytes = memory->bytes();
  return {c10::Storage::use_byte_size_t(), bytes, context->sharedBlock(std::move(memory), index), offloadAllocator(), true};
}

} // namespace offload
