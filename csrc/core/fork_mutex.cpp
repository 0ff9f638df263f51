#include "core/fork_mutex.h"

#include <pthread.h>

#include <array>
#include <set>

namespace offload {
namespace {

constexpr std::size_t kRanks = static_cast<std::size_t>(ForkRank::Other) + 1;

// Never destroyed, as a process may fork while it ends.
class Registry {
 public:
  static Registry& get() {
    static auto* const instance = [] {
      pthread_atfork([] { get().lockAll(); }, [] { get().unlockAll(); }, [] { get().unlockAll(); });
      return new Registry();
    }();
    return *instance;
  }

  void add(ForkMutex* mutex, ForkRank rank) {
    const std::lock_guard lock(mutex_);
    byRank_[static_cast<std::size_t>(rank)].insert(mutex);
  }
  void remove(ForkMutex* mutex, ForkRank rank) {
    const std::lock_guard lock(mutex_);
    byRank_[static_cast<std::size_t>(rank)].erase(mutex);
  }

 private:
  void lockAll() {
    mutex_.lock();
    for (const auto& mutexes : byRank_) {
      for (ForkMutex* const mutex : mutexes) mutex->lock();
    }
  }
  void unlockAll() {
    for (const auto& mutexes : byRank_) {
      for (ForkMutex* const mutex : mutexes) mutex->unlock();
    }
    mutex_.unlock();
  }

  std::mutex mutex_; // innermost but for a fork, which takes it first
  std::array<std::set<ForkMutex*>, kRanks> byRank_; // of one rank always in the same order
};

// As soon as this is loaded: a child that is forked while another thread makes it would wait for ever for it to be made.
[[maybe_unused]] const Registry& atOnce = Registry::get();

} // namespace

ForkMutex::ForkMutex(ForkRank rank) : rank_(rank) {
  Registry::get().add(this, rank_);
}

ForkMutex::~ForkMutex() {
  Registry::get().remove(this, rank_);
}

} // namespace offload
