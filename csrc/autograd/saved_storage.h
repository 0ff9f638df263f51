// The memory of what autograd saved: a device's, or a Block's.
#pragma once

#include "aten/fetch.h"

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <list>
#include <memory>
#include <mutex>
#include <optional>

namespace offload {

class SavedTensors;

/// The memory of what was saved: a device's, until it is in a Block; one for all tensors that share the storage. Its members are
/// guarded by its own mutex, under which Link calls are made, but for those that are SavedOrder's or SavedTensors'.
class SavedStorage : public std::enable_shared_from_this<SavedStorage> {
 public:
  SavedStorage(std::shared_ptr<SavedTensors> owner, const at::Tensor& tensor, c10::Device target, Stream stream);
  SavedStorage(std::shared_ptr<SavedTensors> owner, FetchedSource source, c10::Device target);
  ~SavedStorage();
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;

  /// A tensor over it of `like`'s geometry, which is that of a tensor that was saved; for work on the current stream.
  at::Tensor restore(const at::Tensor& like);

 private:
  friend class SavedOrder;
  friend class SavedTensors;

  enum class Place { Held, Alone, Elsewhere }; // by others too; by nobody else; at home, or it will not go

  bool save(const at::Tensor& tensor, Stream stream);
  c10::Storage memory();
  Place place();
  std::size_t bytesToSend();
  Place placeNow() const;
  bool goHome();
  void fetchAhead(Stream stream) noexcept;

  const std::shared_ptr<SavedTensors> owner_;
  const c10::Device target_; // of a fetch
  const Stream stream_; // on which the storage was written
  const std::size_t bytes_; // of the storage
  const std::optional<c10::Stream> recorded_; // the same, for PyTorch
  std::mutex mutex_;
  c10::Storage storage_; // while its bytes are not in the Block
  bool stays_ = false; // several streams use it, of which the graph keeps it for the last; or it was shorter once
  Extent saved_; // of the storage, which tensors that were saved cover; empty for a Block's
  c10::DataPtr block_; // with the bytes of that
  Extent extent_; // of the Block
  c10::weak_intrusive_ptr<c10::StorageImpl> restored_;
  Stream restoredFor_;
  Pin ahead_;

  // Of SavedOrder, by its mutex.
  const c10::StorageImpl* const key_;
  std::uint64_t number_ = 0;
  std::optional<std::list<SavedStorage*>::iterator> place_;
  bool isHome_ = false;
  bool isAhead_ = false;

  // Of SavedTensors, by its mutex.
  bool isAlone_ = false;
  bool isStaying_ = false; // though it might have gone
};

} // namespace offload
