// Fetch and stash on plain tensors, below autograd.
#pragma once

#include "aten/tensors.h"

#include <vector>

namespace offload {

/// Note [Targets of a fetch]
/// `cuda:i` and, on the simulated link, `cpu:i` name compute devices: the bytes come through the cache. `cpu` without an index
/// names the host itself: the result is an alias of the host bytes, which holds a HostLease that reads. The index of `cpu:i` is the
/// cache's alone; a tensor that was fetched there is on `cpu`.
at::Tensor fetchTo(const at::Tensor& offload, c10::Device target);

/// The same for tensors of one storage, in memory that they share as these do: for who may write to them.
std::vector<at::Tensor> fetchTo(const std::vector<at::Tensor>& offload, c10::Device target);

/// The host bytes themselves as memory of a device, of which an operation that is enqueued next reads so many: Note [Lookups]. To be
/// given up right after. Undefined where a fetch is due.
at::Tensor readInPlace(const at::Tensor& offload, c10::Device target, std::size_t reads);
void endInPlace(const at::Tensor& table);

/// Whether a fetch to this target goes through the cache.
bool isCached(c10::Device target);

/// The compute device that `offload:i` is paired with, or the host where there is none.
c10::Device pairedDevice(c10::DeviceIndex index);

/// An offload tensor with the value of `value`, which the caller keeps: nothing of its memory is held on to. It was born where
/// `computed`, a target of fetchTo(), is. For `gradientOf` see Block::derivedFrom.
at::Tensor stashCopy(
    const at::Tensor& value, c10::Device home, c10::Device computed, Purpose purpose = Purpose::Temporary,
    const void* gradientOf = nullptr);

/// The same for a result that nobody else will write to, made on the target `computed`: where that is a device, the memory becomes
/// a Slot of the new Block, with no copy there; on a machine without one, the Block's host bytes.
at::Tensor stashResult(
    const at::Tensor& value, c10::Device home, c10::Device computed, Purpose purpose, const void* gradientOf = nullptr);

/// Makes such a result the value of an offload tensor that is all of its storage; false where it isn't, or the result was made on
/// the host, and nothing happened.
bool replaceValue(const at::Tensor& offload, const at::Tensor& value, c10::Device computed);

/// Writes a value of the target `computed`, as copy_() does, to an offload tensor that is a part of its storage, where that was born on a
/// device, and the cache has all of it for nobody else just now. False where nothing happened.
bool changePart(const at::Tensor& offload, const at::Tensor& value, c10::Device computed);

/// Whether a tensor's memory is that of a Slot or of a Block: then others read it too.
bool isFetched(const at::Tensor& tensor);

/// The memory of a fetched tensor as one of PyTorch's own, which anybody may write to, where it was a result's, and the offload tensor is
/// gone and nobody else uses it; the fetched one is then good for nothing. Otherwise an undefined tensor.
at::Tensor takeBack(const at::Tensor& fetched);

/// Keeps the memory of a tensor fetched through the cache, if it has any now, for what is enqueued on `stream` until the tensor
/// goes; false for others.
bool useFetchedOn(const at::Tensor& tensor, Stream stream);

/// To be called before a tensor that was fetched through the cache is written to: others may still read its memory, copies home too.
void beforeChange(const at::Tensor& fetched);

/// Gives the source of a tensor that was fetched through the cache what has been written to that tensor, unless the source itself has
/// been written to since.
void bringHome(const at::Tensor& fetched);

/// What a tensor's memory was fetched of through the cache.
struct FetchedSource {
  c10::DataPtr block; // one of its owners
  Extent extent;
  int device;
};
/// None where the memory was not fetched, or has been released, or the Block was written to since or is gone.
std::optional<FetchedSource> sourceOf(const at::Tensor& fetched);

/// An extent, which isn't empty, on a target of fetchTo() that is cached.
c10::Storage fetchStorage(Block& block, Extent extent, c10::Device target);

/// A new Block, page-locked if `locked`, with an extent of a storage on a device, which `producer` has written and nobody will write to
/// again. It is copied to the host at once, and the storage is let go when room is wanted.
c10::DataPtr sendHome(const c10::Storage& storage, Extent extent, Purpose purpose, Stream producer, bool locked);

/// Has `record_stream` ask for that; to be called once, at first use.
void interceptRecordStream();

/// Drops the memory of a fetched tensor, and fetches it once more, the newest bytes then of its source, to where it was. See Note [Release and
/// refill]. The extent is what fetchedExtent() gave before: more than the tensor's own where it shares the memory with others.
void releaseFetched(const c10::Storage& fetched);
void refillFetched(
    const c10::Storage& fetched, c10::ScalarType type, const at::Tensor& offload, Extent extent, c10::Device target);
Extent fetchedExtent(const at::Tensor& fetched, const at::Tensor& offload);

} // namespace offload
