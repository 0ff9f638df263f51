// What is saved, in the order in which it was, which backward turns round.
#pragma once

#include "autograd/saved_storage.h"

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace offload {

/// The storages of one device that may go to the host, whatever regions and threads save them; all of them know of each other here.
/// Its members may be called from any thread.
class SavedOrder {
 public:
  /// One for each device, for as long as the process runs.
  static SavedOrder& of(c10::Device target);

  /// That of the tensor's storage, which knows of the tensor from now on; null where it isn't known, or has gone home.
  std::shared_ptr<SavedStorage> find(const at::Tensor& tensor, Stream stream);
  void add(const std::shared_ptr<SavedStorage>& saved);
  /// Those that nobody else holds any more, of the first `most` that wait for that, or all; each is told once. The last of them, up to so many
  /// bytes and one at least where that is not 0, wait on.
  std::vector<std::shared_ptr<SavedStorage>> newlyAlone(std::size_t most, std::size_t lastBytes = 0);
  void wentHome(SavedStorage& saved);
  bool isHome(const SavedStorage& saved);
  /// Backward has been given `saved`: those before it will be asked for soon, up to `most` bytes of them.
  void fetchAheadOf(const SavedStorage& saved, std::size_t most);
  /// The graph lets go of it, and so of this much memory of the device.
  void forget(SavedStorage& saved, std::size_t freed) noexcept;

 private:
  std::vector<std::shared_ptr<SavedStorage>> passedBy(const SavedStorage& saved);
  std::vector<std::shared_ptr<SavedStorage>> before(const SavedStorage& saved, std::size_t most);
  bool mayFetch(std::size_t ahead, std::size_t most) const;
  bool isAhead(const SavedStorage& saved);

  std::mutex mutex_; // never held across a call of the Link, nor while a SavedStorage goes
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<SavedStorage>> known_; // that are not home
  std::deque<std::weak_ptr<SavedStorage>> waiting_; // for others to let go of them
  std::list<SavedStorage*> order_;
  std::vector<SavedStorage*> ahead_;
  std::size_t aheadBytes_ = 0;
  std::size_t bytes_ = 0; // of all
  std::size_t freedBytes_ = 0; // since this backward has begun
  std::array<std::uint64_t, 8> asked_{}; // the numbers of those that backward was given last
  std::size_t askedCount_ = 0; // in this backward
  std::uint64_t count_ = 0;
};

} // namespace offload
