// Mutexes that a forked child finds unlocked.
//
// Note [Locks and fork]
// Without a cache (forked.h) a forked child goes on with offload tensors as with any others. It has the thread that forked alone: a mutex that
// another thread held at that moment would stay locked for ever, and what it guards be half changed. So whoever forks first takes the
// mutexes of all that lives as long as the process, in the order of their ranks, and gives them back in the parent and the child.
// One that has a rank is held for a moment, or for as long as a file is read. While it is held nobody waits for Python's lock, nor for
// one of a lower rank or of its own, and none is made or destroyed.
#pragma once

#include <mutex>

namespace offload {

enum class ForkRank { FileBytes, File, FileEdges, Blocks, Accounts, Arena, Other };

class ForkMutex {
 public:
  explicit ForkMutex(ForkRank rank);
  ~ForkMutex();
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;

  void lock() {
    mutex_.lock();
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  const ForkRank rank_;
};

} // namespace offload
