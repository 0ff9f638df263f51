#include "aten/fetch.h"

#include "aten/autocast_copies.h"
#include "aten/lookup.h"
#include "aten/needless_work.h"
#include "aten/refusals.h"
#include "aten/sparse.h"
#include "compat/released_storage.h"
#include "core/error.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace offload {
namespace {

struct FetchedMemory {
  Pin pin;
  Extent extent; // of the Block, from where the memory begins on
  std::mutex mutex{}; // of the Pin's streams
};

/// Host memory of a tensor that is not on offload.
template <class Lease>
struct LeasedMemory {
  static void remove(void* memory) {
    delete static_cast<LeasedMemory*>(memory);
  }
  c10::DataPtr block; // outlives its lease
  Lease lease;
};
using AliasedMemory = LeasedMemory<HostLease>;
using MemoryInPlace = LeasedMemory<DeviceLease>;

void deleteFetched(void* memory) {
  delete static_cast<FetchedMemory*>(memory);
}

c10::DataPtr fetchBytes(Block& block, const Extent& extent, c10::Device target) {
  const c10::Device device = target.is_cpu() ? c10::Device(c10::kCPU) : target;
  Context& context = Context::get();
  Pin pin;
  try {
    pin = context.residency().fetch(block, extent, context.currentStream(target.index()));
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  }
  void* data = pin.data();
  return {data, new FetchedMemory{std::move(pin), extent}, &deleteFetched, device};
}

// The bytes of a fetch, from the aligned beginning of the extent on.
c10::DataPtr fetchBytes(const at::Tensor& offload, const Extent& extent, c10::Device target) {
  if (extent.bytes() == 0) return {nullptr, target.is_cpu() ? c10::Device(c10::kCPU) : target};
  return fetchBytes(blockOf(offload.storage()), extent, target);
}

// Memory of a tensor that was fetched through the cache, if it has that now.
FetchedMemory* fetchedMemory(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  if (compat::isReleased(storage)) return nullptr;
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &deleteFetched ? static_cast<FetchedMemory*>(data.get_context()) : nullptr;
}

at::Tensor fetchAlias(const at::Tensor& offload) {
  existingExtentOf(offload);
  const auto& source = offload.storage();
  auto* memory = new AliasedMemory{};
  c10::DataPtr data(const_cast<void*>(source.data()), memory, &AliasedMemory::remove, c10::Device(c10::kCPU));
  if (source.nbytes() > 0) {
    Block& block = blockOf(source);
    memory->block = Context::retain(block);
    memory->lease = Context::get().lease(block, Access::Read);
  }
  c10::Storage alias(c10::Storage::use_byte_size_t(), source.nbytes(), std::move(data), nullptr, false);
  return tensorOver(std::move(alias), c10::kCPU, offload, offload.storage_offset());
}

// The owner of memory that outlives the tensor it came from.
std::shared_ptr<void> keep(const c10::Storage& storage) {
  return std::make_shared<c10::Storage>(storage);
}

void checkTarget(c10::Device target) {
  const Backend backend = Context::get().backend();
  const c10::DeviceIndex index = std::max<c10::DeviceIndex>(0, target.index());
  const bool known = isCached(target) ? target == pairedDevice(index) && index < deviceCount() : target.is_cpu();
  TORCH_CHECK(
      known, "offload: a tensor can't be fetched to ", target, ", which is neither the CPU nor a device that computes here",
      backend == Backend::Cuda ? "." : " (there is no GPU).");
}

// A leaf that a user made without a module: what requires gradients, and no operation has made, is a parameter.
void claimLeaf(const at::Tensor& offload) {
  if (!offload.requires_grad() || offload.is_sparse() || offload.storage().nbytes() == 0) return;
  Block& block = blockOf(offload.storage());
  if (block.purpose == Purpose::Temporary && offload.is_leaf()) Context::get().accounts().claim(block, Purpose::Parameter);
}

// The newest value of a Block is what the device `computed` has just written here.
void adoptBytes(Block& block, const at::Tensor& value, c10::Device computed) {
  Context& context = Context::get();
  const auto& storage = value.storage();
  const Stream stream = context.currentStream(value.is_cuda() ? value.device().index() : computed.index());
  DeviceBuffer buffer{const_cast<void*>(storage.data()), storage.nbytes(), stream, keep(storage)};
  context.residency().adopt(block, std::move(buffer), stream);
}

} // namespace

bool isCached(c10::Device target) {
  return target.is_cuda() || target.has_index();
}

c10::Device pairedDevice(c10::DeviceIndex index) {
  switch (Context::get().backend()) {
    case Backend::Cuda:
      return {c10::kCUDA, index};
    case Backend::Sim:
      return {c10::kCPU, index};
    default:
      return {c10::kCPU};
  }
}

namespace {

// What a fetch asks first; the target by its full name.
c10::Device checkedTarget(const at::Tensor& offload, c10::Device target) {
  const Backend backend = Context::get().backend();
  if (target.is_cpu() && backend != Backend::Sim) target = c10::Device(c10::kCPU); // no cache by that name
  if (target == c10::Device(c10::kCUDA) && backend == Backend::Cuda)
    target = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice();
  checkTarget(target);
  checkLayout(offload);
  claimLeaf(offload);
  return target;
}

c10::Storage storageOf(c10::DataPtr data, Extent extent) {
  return {c10::Storage::use_byte_size_t(), extent.bytes(), std::move(data), nullptr, false};
}

// A tensor over bytes of an extent, from its aligned beginning on.
at::Tensor tensorOf(c10::Storage storage, Extent extent, c10::Device target, const at::Tensor& offload) {
  const auto item = static_cast<std::size_t>(offload.element_size());
  const auto shift = offload.numel() == 0 ? 0 : offload.storage_offset() - static_cast<std::int64_t>(extent.begin / item);
  return tensorOver(std::move(storage), target.type(), offload, shift);
}

// The tensors that are made while this lives are inference tensors where their source is one: what autograd may not save of it, it may
// not save of them, and within that mode those of others count writes, and their views know that it requires a gradient.
class ModeOf {
 public:
  explicit ModeOf(const at::Tensor& offload) {
    if (offload.is_inference() == c10::InferenceMode::is_enabled()) return;
    mode_.emplace(offload.is_inference());
    below_.emplace(); // which the end of the mode would undo
  }

 private:
  std::optional<c10::InferenceMode> mode_;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_;
};

} // namespace

at::Tensor fetchTo(const at::Tensor& offload, c10::Device target) {
  target = checkedTarget(offload, target);
  const ModeOf mode(offload);
  at::Tensor result;
  if (isSparse(offload)) {
    const auto [indices, values] = partsOf(offload);
    result = sparseOf({fetchTo(indices, target), fetchTo(values, target)}, offload);
  } else if (isCached(target)) {
    const Extent extent = existingExtentOf(offload).aligned();
    countExcess(offload, extent.bytes());
    result = tensorOf(storageOf(fetchBytes(offload, extent, target), extent), extent, target, offload);
  } else {
    result = fetchAlias(offload);
  }
  shareVersionCounter(offload, result);
  return result;
}

std::vector<at::Tensor> fetchTo(const std::vector<at::Tensor>& offload, c10::Device target) {
  std::vector<at::Tensor> results;
  results.reserve(offload.size());
  std::optional<Extent> all;
  for (const auto& tensor : offload) {
    target = checkedTarget(tensor, target);
    const Extent extent = existingExtentOf(tensor);
    if (extent.bytes() == 0) continue;
    all = all ? Extent{std::min(all->begin, extent.begin), std::max(all->end, extent.end)} : extent;
  }
  if (!isCached(target) || !all) {
    for (const auto& tensor : offload) results.push_back(fetchTo(tensor, target));
    return results;
  }
  const Extent extent = all->aligned();
  const c10::Storage memory = fetchStorage(blockOf(offload.front().storage()), extent, target);
  for (const auto& tensor : offload) {
    const ModeOf mode(tensor);
    results.push_back(tensorOf(memory, extent, target, tensor));
    shareVersionCounter(tensor, results.back());
  }
  return results;
}

at::Tensor readInPlace(const at::Tensor& offload, c10::Device target, std::size_t reads) {
  target = checkedTarget(offload, target);
  const Extent extent = existingExtentOf(offload).aligned();
  Context& context = Context::get();
  const Stream stream = context.currentStream(target.index());
  if (!isReadInPlace(extent.bytes(), reads, stream)) return {};
  auto memory = std::make_unique<MemoryInPlace>();
  Block& block = blockOf(offload.storage());
  memory->block = Context::retain(block);
  memory->lease = context.residency().leaseToDevice(block, extent, stream, reads);
  if (!memory->lease) return {};
  const ModeOf mode(offload);
  auto* const begin = const_cast<void*>(memory->lease.data());
  const c10::Device device = target.is_cpu() ? c10::Device(c10::kCPU) : target;
  c10::DataPtr data(begin, memory.release(), &MemoryInPlace::remove, device);
  auto result = tensorOf(storageOf(std::move(data), extent), extent, target, offload);
  shareVersionCounter(offload, result);
  return result;
}

void endInPlace(const at::Tensor& table) {
  compat::releaseMemory(
      *table.storage().unsafeGetStorageImpl(),
      "offload: this tensor was the host bytes of an offload operand, for one operation that has looked up some of them, "
      "and has no memory since; read the operand itself.");
}

namespace {

// By the host bytes: the device keeps nothing of it.
at::Tensor stashOnHost(
    const at::Tensor& value, c10::Device home, c10::Device computed, Purpose purpose, const void* gradientOf) {
  const auto strides =
      value.is_non_overlapping_and_dense() ? value.strides().vec() : at::infer_dense_strides(value.sizes(), value.strides());
  const Born born = isCached(computed) ? Born::Device : Born::Host;
  auto result = emptyOffload(value.sizes(), strides, value.scalar_type(), home, born, purpose);
  if (gradientOf != nullptr && result.storage().nbytes() > 0) blockOf(result.storage()).derivedFrom = gradientOf;
  result.copy_(value);
  return result;
}

// Whoever has made the tensor may have taken its parts from another one, or from the tensor's maker.
at::Tensor stashParts(
    const at::Tensor& sparse, c10::Device home, c10::Device computed, Purpose purpose, const void* gradientOf, bool give) {
  const auto [indices, values] = partsOf(sparse);
  const auto stashed = [&](const at::Tensor& part, const void* of) {
    return give && isOwnPart(part) ? stashResult(part, home, computed, purpose, of)
                                   : stashCopy(part, home, computed, purpose, of);
  };
  auto result = sparseOf({stashed(indices, nullptr), stashed(values, gradientOf)}, sparse);
  if (give) shareVersionCounter(sparse, result);
  return result;
}

} // namespace

at::Tensor stashCopy(const at::Tensor& value, c10::Device home, c10::Device computed, Purpose purpose, const void* gradientOf) {
  checkLayout(value);
  if (isSparse(value)) return stashParts(value, home, computed, purpose, gradientOf, false);
  if (!isCached(computed) || value.numel() == 0 || value._is_zerotensor()) {
    return stashOnHost(value, home, computed, purpose, gradientOf);
  }
  // A copy on the device is where the next operation finds it, and one to the host would have to come back.
  at::Tensor copy;
  try {
    copy = value.clone();
  } catch (const c10::OutOfMemoryError&) {
    return stashOnHost(value, home, computed, purpose, gradientOf);
  }
  return stashResult(copy, home, computed, purpose, gradientOf);
}

at::Tensor stashResult(
    const at::Tensor& value, c10::Device home, c10::Device computed, Purpose purpose, const void* gradientOf) {
  checkLayout(value);
  if (isSparse(value)) return stashParts(value, home, computed, purpose, gradientOf, true);
  Context& context = Context::get();
  const auto& storage = value.storage();
  const bool onDevice = isCached(computed);
  // Zeros that autograd made for nobody to look at have no memory.
  if (value._is_zerotensor() || (context.hasCache() && !onDevice))
    return stashOnHost(value, home, computed, purpose, gradientOf);
  if (!coversItsStorage(value) || isFetched(value)) return stashCopy(value, home, computed, purpose, gradientOf);
  home = withIndex(home);
  c10::DataPtr data;
  if (onDevice) {
    data = context.newBlock(storage.nbytes(), home.index(), Born::Device, purpose);
    auto& block = *static_cast<Block*>(data.get_context());
    block.derivedFrom = gradientOf;
    adoptBytes(block, value, computed);
  } else {
    data = context.foreignBlock(const_cast<void*>(storage.data()), storage.nbytes(), home.index(), keep(storage), purpose);
  }
  c10::Storage stashed(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), offloadAllocator(), true);
  auto result = tensorOver(std::move(stashed), kOffload, value, value.storage_offset());
  shareVersionCounter(value, result);
  return result;
}

bool replaceValue(const at::Tensor& offload, const at::Tensor& value, c10::Device computed) {
  const bool same = offload.scalar_type() == value.scalar_type() && offload.sizes() == value.sizes() &&
      offload.strides() == value.strides() && offload.is_conj() == value.is_conj() && offload.is_neg() == value.is_neg();
  if (!same || !isCached(computed) || !coversItsStorage(offload) || !coversItsStorage(value) || isFetched(value) ||
      offload.storage().nbytes() != value.storage().nbytes() || offload.storage_offset() != value.storage_offset()) {
    return false;
  }
  Block& block = blockOf(offload.storage());
  if (block.born != Born::Device) return false;
  adoptBytes(block, value, computed);
  return true;
}

bool changePart(const at::Tensor& offload, const at::Tensor& value, c10::Device computed) {
  Block& block = blockOf(offload.storage());
  if (!isCached(computed) || block.born != Born::Device) return false;
  Context& context = Context::get();
  const Stream stream = context.currentStream(computed.index());
  const c10::Device device = computed.is_cpu() ? c10::Device(c10::kCPU) : computed; // whose index is the cache's alone
  const c10::DataPtr retained = Context::retain(block); // another thread may give the storage other memory
  return context.residency().changeThere(block, stream, [&](void* data, void* owner) {
    if (owner != nullptr && static_cast<const c10::Storage*>(owner)->use_count() > 1) return false; // somebody has kept it
    c10::Storage there = storageOf(c10::DataPtr(data, device), {0, block.bytes});
    tensorOver(std::move(there), device.type(), offload, offload.storage_offset()).copy_(value);
    return true;
  });
}

bool isFetched(const at::Tensor& tensor) {
  bool fetched = false;
  visitDense(tensor, [&fetched](const at::Tensor& dense) {
    if (!dense.has_storage()) return;
    const auto deleter = dense.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_deleter();
    fetched = fetched || deleter == &deleteFetched || deleter == &AliasedMemory::remove || deleter == &MemoryInPlace::remove;
  });
  return fetched;
}

at::Tensor takeBack(const at::Tensor& fetched) {
  FetchedMemory* const memory = fetchedMemory(fetched);
  if (memory == nullptr || !memory->pin || fetched.use_count() != 1 || fetched.storage().use_count() != 1) return {};
  const auto* const begin = static_cast<const std::byte*>(memory->pin.data());
  const Context& context = Context::get();
  const auto index = static_cast<c10::DeviceIndex>(memory->pin.device());
  auto owner = context.residency().takeBack(memory->pin, context.currentStream(index));
  if (!owner) return {};
  const c10::Storage storage = *static_cast<const c10::Storage*>(owner.get()); // see keep()
  owner = nullptr;
  const auto shift = (begin - static_cast<const std::byte*>(storage.data())) / fetched.element_size();
  auto result = tensorOver(storage, fetched.device().type(), fetched, fetched.storage_offset() + shift);
  return storage.use_count() == 2 ? result : result.clone(); // or somebody has kept it since it was made
}

bool useFetchedOn(const at::Tensor& tensor, Stream stream) {
  if (!tensor.has_storage()) return false;
  if (compat::isReleased(*tensor.storage().unsafeGetStorageImpl())) return true; // it has no memory now
  FetchedMemory* const memory = fetchedMemory(tensor);
  if (memory == nullptr) return false;
  std::lock_guard lock(memory->mutex);
  memory->pin.alsoUsedOn(stream);
  return true;
}

std::optional<FetchedSource> sourceOf(const at::Tensor& fetched) {
  const FetchedMemory* const memory = fetchedMemory(fetched);
  if (memory == nullptr || !memory->pin) return {};
  Block* const block = Context::get().residency().retainSource(memory->pin);
  if (block == nullptr) return {};
  return FetchedSource{Context::owned(*block), memory->extent, memory->pin.device()};
}

void beforeChange(const at::Tensor& fetched) {
  visitDense(fetched, [](const at::Tensor& dense) {
    const FetchedMemory* const memory = fetchedMemory(dense);
    if (memory == nullptr) return;
    const Context& context = Context::get();
    const auto index = static_cast<c10::DeviceIndex>(memory->pin.device());
    context.residency().beforeChange(memory->pin, context.currentStream(index));
  });
}

void bringHome(const at::Tensor& fetched) {
  visitDense(fetched, [](const at::Tensor& dense) {
    const auto source = sourceOf(dense); // which stays meanwhile
    if (!source) return;
    const Context& context = Context::get();
    const auto index = static_cast<c10::DeviceIndex>(source->device);
    context.residency().bringHome(fetchedMemory(dense)->pin, context.currentStream(index));
  });
}

c10::Storage fetchStorage(Block& block, Extent extent, c10::Device target) {
  return storageOf(fetchBytes(block, extent, target), extent);
}

c10::DataPtr sendHome(const c10::Storage& storage, Extent extent, Purpose purpose, Stream producer, bool locked) {
  Context& context = Context::get();
  const auto index = static_cast<c10::DeviceIndex>(producer.device);
  auto data = context.newBlock(extent.bytes(), index, Born::Device, purpose, locked);
  auto& block = *static_cast<Block*>(data.get_context());
  auto* const begin = static_cast<std::byte*>(const_cast<void*>(storage.data())) + extent.begin;
  block.goesHome = true;
  DeviceBuffer buffer{begin, storage.nbytes(), producer, keep(storage)};
  context.residency().adopt(block, std::move(buffer), producer);
  return data;
}

void releaseFetched(const c10::Storage& fetched) {
  auto& storage = *fetched.unsafeGetStorageImpl();
  if (storage.nbytes() == 0) return; // nothing to read
  // The Pin goes with the old pointer.
  compat::releaseMemory(
      storage,
      "offload: this tensor is what an operation has saved of an offload operand, and it has memory only while its "
      "backward runs; read the operand itself, or run the forward in "
      "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), which keeps it.");
}

Extent fetchedExtent(const at::Tensor& fetched, const at::Tensor& offload) {
  const FetchedMemory* const memory = fetchedMemory(fetched);
  return memory == nullptr ? existingExtentOf(offload).aligned() : memory->extent;
}

void refillFetched(
    const c10::Storage& fetched, c10::ScalarType type, const at::Tensor& offload, Extent extent, c10::Device target) {
  auto& storage = *fetched.unsafeGetStorageImpl();
  if (!compat::isReleased(storage)) return;
  if (type == offload.scalar_type()) {
    TORCH_CHECK(
        extent.end <= offload.storage().nbytes(), "offload: a tensor of shape ", offload.sizes(), " needs ", extent.end,
        " bytes of its storage, which has ", offload.storage().nbytes(), "; the storage was resized or freed.");
    return compat::giveMemory(storage, fetchBytes(offload, extent, target));
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor cast = fetchCopy(offload, target, type);
  if (!cast.defined()) cast = fetchTo(offload, target).to(type);
  compat::giveMemory(storage, cast.storage().unsafeGetStorageImpl()->set_data_ptr({nullptr, cast.device()}));
}

} // namespace offload
