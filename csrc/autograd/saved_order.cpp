#include "autograd/saved_order.h"

#include "aten/context.h"
#include "autograd/saved_tensors.h"

#include <algorithm>
#include <iterator>

namespace offload {
namespace {

constexpr int kMostLookedAt = 32; // of what was saved before, for each that is asked for
constexpr std::size_t kMostAhead = 16; // copies, with each that is asked for
constexpr std::size_t kTurn = 16; // as a part of what is saved: so much is given back before more is fetched ahead

// Without becoming one more owner, who might be the last.
bool isOf(const std::weak_ptr<SavedStorage>& pointer, const SavedStorage& saved) {
  const auto own = const_cast<SavedStorage&>(saved).weak_from_this();
  return !pointer.owner_before(own) && !own.owner_before(pointer);
}

} // namespace

SavedOrder& SavedOrder::of(c10::Device target) {
  // Not destroyed: what is saved may live as long as Python's last objects.
  static auto* const orders = new std::vector<SavedOrder>(static_cast<std::size_t>(Context::get().link()->deviceCount()));
  return orders->at(static_cast<std::size_t>(target.has_index() ? target.index() : 0));
}

std::shared_ptr<SavedStorage> SavedOrder::find(const at::Tensor& tensor, Stream stream) {
  std::shared_ptr<SavedStorage> known;
  {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
    if (found != known_.end()) known = found->second.lock();
  }
  // Else another thread has just sent it home, and the address is another storage's.
  return known && known->save(tensor, stream) ? known : nullptr;
}

void SavedOrder::add(const std::shared_ptr<SavedStorage>& saved) {
  const std::lock_guard lock(mutex_);
  saved->number_ = ++count_;
  bytes_ += saved->bytes_;
  saved->place_ = order_.insert(order_.end(), saved.get());
  known_[saved->key_] = saved;
  waiting_.push_back(saved);
}

// What is still held by others waits on, behind the rest.
std::vector<std::shared_ptr<SavedStorage>> SavedOrder::newlyAlone(std::size_t most, std::size_t lastBytes) {
  std::vector<std::shared_ptr<SavedStorage>> result;
  {
    const std::lock_guard lock(mutex_);
    most = std::min(most, waiting_.size());
  }
  for (std::size_t looked = 0; looked < most; ++looked) {
    std::shared_ptr<SavedStorage> next;
    {
      const std::lock_guard lock(mutex_);
      while (!next && !waiting_.empty()) {
        next = waiting_.front().lock();
        waiting_.pop_front();
      }
    }
    if (!next) break;
    const auto place = next->place();
    if (place == SavedStorage::Place::Alone) {
      result.push_back(std::move(next));
    } else if (place == SavedStorage::Place::Held) {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(next);
    }
  }
  auto last = result.end();
  for (std::size_t bytes = 0; last != result.begin() && lastBytes > 0; --last) {
    bytes += (*std::prev(last))->bytes_;
    if (bytes > lastBytes && last != result.end()) break;
  }
  {
    const std::lock_guard lock(mutex_);
    waiting_.insert(waiting_.end(), last, result.end());
  }
  result.erase(last, result.end());
  return result;
}

void SavedOrder::wentHome(SavedStorage& saved) {
  const std::lock_guard lock(mutex_);
  saved.isHome_ = true;
  const auto known = known_.find(saved.key_);
  if (known != known_.end() && isOf(known->second, saved)) known_.erase(known);
}

bool SavedOrder::isHome(const SavedStorage& saved) {
  const std::lock_guard lock(mutex_);
  return saved.isHome_;
}

void SavedOrder::fetchAheadOf(const SavedStorage& saved, std::size_t most) {
  if (!saved.place_) return; // an offload weight, which the Schedule knows
  for (const auto& passed : passedBy(saved)) {
    const std::lock_guard lock(passed->mutex_);
    passed->ahead_ = {};
  }
  const Stream stream = Context::get().currentStream(static_cast<c10::DeviceIndex>(saved.stream_.device));
  for (const auto& next : before(saved, std::min(most, Context::get().residency().ringBytes() / 2))) {
    next->fetchAhead(stream);
    if (isAhead(*next)) continue;
    const std::lock_guard lock(next->mutex_); // backward has passed it by meanwhile
    next->ahead_ = {};
  }
}

// What was fetched ahead and has been given to backward, or will not be: a node asks for what it saved in any order. What is newer
// than all that was asked for begins another backward.
std::vector<std::shared_ptr<SavedStorage>> SavedOrder::passedBy(const SavedStorage& saved) {
  std::vector<std::shared_ptr<SavedStorage>> result;
  const std::lock_guard lock(mutex_);
  const bool begins = saved.number_ > *std::max_element(asked_.begin(), asked_.end());
  if (begins) askedCount_ = freedBytes_ = 0;
  asked_[askedCount_++ % asked_.size()] = saved.number_;
  const std::uint64_t latest = *std::max_element(asked_.begin(), asked_.end());
  std::erase_if(ahead_, [&](SavedStorage* ahead) {
    if (!begins && ahead->number_ != saved.number_ && ahead->number_ <= latest) return false;
    ahead->isAhead_ = false;
    aheadBytes_ -= ahead->extent_.bytes();
    if (auto held = ahead->weak_from_this().lock()) result.push_back(std::move(held));
    return true;
  });
  return result;
}

// Most memory is in use soon after backward's beginning, where operations need some for gradients too. So nothing is fetched ahead
// before it has given back a part of all that is saved, or has asked for some storages: a graph that is kept gives nothing back, and
// others may be kept beside it. Then as much is as it has given back, and one storage at least.
bool SavedOrder::mayFetch(std::size_t ahead, std::size_t most) const {
  if (askedCount_ <= asked_.size() && freedBytes_ < (freedBytes_ + bytes_) / kTurn) return false;
  if (ahead_.empty()) return true;
  return ahead <= most && (freedBytes_ == 0 || ahead <= freedBytes_);
}

// What to fetch next, and is noted as fetched ahead.
std::vector<std::shared_ptr<SavedStorage>> SavedOrder::before(const SavedStorage& saved, std::size_t most) {
  std::vector<std::shared_ptr<SavedStorage>> result;
  const std::lock_guard lock(mutex_);
  auto place = *saved.place_;
  for (int looked = 0; place != order_.begin() && result.size() < kMostAhead && looked < kMostLookedAt; ++looked) {
    SavedStorage& before = **--place;
    if (!before.isHome_ || before.isAhead_ || !before.owner_->options().useStreams) continue;
    const std::size_t bytes = aheadBytes_ + before.extent_.bytes();
    if (!mayFetch(bytes, most)) break;
    auto held = before.weak_from_this().lock();
    if (!held) continue;
    before.isAhead_ = true;
    aheadBytes_ = bytes;
    ahead_.push_back(&before);
    result.push_back(std::move(held));
  }
  return result;
}

bool SavedOrder::isAhead(const SavedStorage& saved) {
  const std::lock_guard lock(mutex_);
  return saved.isAhead_;
}

void SavedOrder::forget(SavedStorage& saved, std::size_t freed) noexcept {
  const std::lock_guard lock(mutex_);
  if (!saved.place_) return;
  bytes_ -= saved.bytes_;
  freedBytes_ += freed;
  order_.erase(*saved.place_);
  if (!saved.isHome_) {
    const auto known = known_.find(saved.key_);
    if (known != known_.end() && known->second.expired()) known_.erase(known);
  }
  if (saved.isAhead_) {
    aheadBytes_ -= saved.extent_.bytes();
    std::erase(ahead_, &saved);
  }
}

} // namespace offload
